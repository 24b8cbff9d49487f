"""What changes from step to step of a retraining, seen from inside the network while it is trained."""

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from greedynas import build_network
from greedynas.data.transforms import denormalised
from greedynas.models.model_file import load_network
from greedynas.runtime.rng import torch_stream
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import Run
from tests.helpers.pictures import opened
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


def new_network(classes, dropout=0.0):
    space = tiny_space()
    return build_network("2111", space, num_classes=classes, dropout=dropout, generator=torch_stream(0, "retrain init"))


def plain_colours(folder, counts):
    """An image folder in which all pictures of a class have one colour: 0 for the first class, 255 for the last."""
    for level, (name, count) in zip(np.linspace(0, 255, len(counts)), counts.items(), strict=True):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.full((8, 8, 3), round(level), np.uint8)).save(folder / name / f"{i}.png")
    return folder


def recipe_of(**settings):
    return make_recipe(RetrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.2, "dropout": 0, **settings}))


def test_dropout_drops_other_features_at_every_step(data):
    network, kept = new_network(3, dropout=0.5), []
    network.dropout.register_forward_hook(lambda _, inputs, output: kept.append((inputs[0] != 0, output != 0)))
    retrain(network, data.train, recipe_of(dropout=0.5, batch_size=14))
    assert len(kept) == 9  # three steps an epoch
    assert all(0.3 < after[before].float().mean() < 0.7 for before, after in kept)
    # Masks of two steps agree on half of the features that were not 0 in both, not on all of them.
    for i, (before, after) in enumerate(kept):
        for earlier_before, earlier_after in kept[:i]:
            both = before & earlier_before
            assert (after == earlier_after)[both].float().mean() < 0.7


@pytest.mark.parametrize("steps", [1, 2])
def test_images_are_mixed_in_other_shares_at_every_step(tmp_path, steps):
    """Of black and white images a mixture has two more greys: its share, and one minus that."""
    images = opened(
        plain_colours(tmp_path, {"black": 10, "white": 10}), 8, 3, val_images=2, test_images=2, augment="none"
    )
    network, shares = new_network(2), []

    def look(_, arguments):
        greys = denormalised(arguments[0])[:, 0, 0, 0].unique().tolist()
        assert set(greys) - {0, 255}
        shares.append(min(set(greys) - {0, 255}))

    network.register_forward_pre_hook(look)
    retrain(network, images.train, recipe_of(epochs=6 // steps, batch_size=16 // steps, mixup=5.0))
    assert len(shares) == 6
    assert len(set(shares)) == 6


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_class_weights_of_the_run_enter_its_retrainings(tmp_path, weights):
    """Where all images are the same, a network can learn nothing but how much each class counts."""
    for split, counts in {"train": (34, 6), "val": (2, 2), "test": (2, 2)}.items():
        for name, count in zip(("often", "rare"), counts, strict=True):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (90, 120, 150)).save(folder / f"{i}.png")
    source = {"source": str(tmp_path / "data"), "workers": 0, "augment": "none", "check_duplicates": False}
    config = Config(name="tiny", space=tiny_space(), device="cpu", data={**source, "class_weights": weights})
    Run.start(tmp_path / "run", config).close()
    settings = RetrainSettings(epochs=60, batch_size=40, lr=1.0, dropout=0, label_smoothing=0, weight_decay=0)
    retrain_stage(tmp_path / "run", Console(quiet=True), settings=settings, arch="2111")
    network, card = load_network(tmp_path / "run" / "models" / "2111" / "model.safetensors")
    images, _ = opened(tmp_path / "data", 8, 3).test().eval_batch()
    with torch.no_grad():
        found = network(images).softmax(1)[:, card.class_names.index("rare")]
    expected = 0.5 if weights == "balanced" else 6 / 40
    assert found.tolist() == pytest.approx([expected] * 4, abs=0.12)
