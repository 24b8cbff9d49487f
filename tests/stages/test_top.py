"""Tests of `retrain --top`: the choice among found networks where validation and test images disagree."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from greedynas import build_network
from greedynas.data.transforms import normalisation
from greedynas.runtime.rng import torch_stream
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.train import train_stage
from tests.helpers.pictures import opened, picture
from tests.helpers.retraining import DATA
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = Console(quiet=True)
RETRAIN = RetrainSettings(epochs=1, batch_size=14, lr=4.0, top=3, top_epochs=6)
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def searched(photos, tmp_path_factory):
    """Make a run with a finished search."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    config = Config(
        name="tiny", space=tiny_space(), data={**DATA, "source": str(photos)}, train=SETTINGS, precision="fp32"
    )
    train_stage(config, folder, QUIET)
    limits = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}
    requests = make_requests(folder, limits, "evolution", (), True, None, ["population=6", "generations=3"], None)
    search_stage(folder, requests, None, QUIET)
    return folder


def candidates(run, data):
    """Retrain with `--top`, and return the candidates in order and the chosen path."""
    result = retrain_stage(run, QUIET, settings=RETRAIN, data=data)
    compared = json.loads((run / "models" / result["model"] / "top.json").read_text())["candidates"]
    return compared, result["path"]


def after_short_training(path, data):
    recipe = make_recipe(RETRAIN)
    network = build_network(path, tiny_space(), dropout=recipe.dropout, generator=torch_stream(0, "retrain init"))
    return retrain(network.to(memory_format=torch.channels_last), data.train, recipe.shortened(RETRAIN.top_epochs))[0]


def paint_disagreement(networks, folder):
    """Paint images so that only the second network is right on validation images, and only the first on test images."""
    pictures = [picture([9, number], (8, 8)) for number in range(3000)]
    mean, std = (torch.tensor(values)[:, None, None] for values in normalisation(3))
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in pictures])).permute(0, 3, 1, 2)
    with torch.no_grad():
        first, second, third = (network((pixels / 255 - mean) / std).argmax(1) for network in networks)
    for label, name in enumerate(NAMES):
        images = {
            "val": (second == label) & (first != label) & (third != label),
            "test": (first == label) & (second != label),
            "train": first == first,  # of any kind: the run has training images of its own
        }
        for split, fitting in images.items():
            numbers = fitting.nonzero().flatten().tolist()[: 4 if split == "val" else 2]
            assert len(numbers) == (4 if split == "val" else 2), "the networks agree too well"
            (folder / split / name).mkdir(parents=True)
            for number in numbers:
                pictures[number].save(folder / split / name / f"{number}.png")
    return folder


def test_the_choice_uses_validation_images_and_not_test_images(searched, photos, tmp_path):
    data = opened(photos, 8, 3, **DATA)
    before, _ = candidates(shutil.copytree(searched, tmp_path / "before"), data)
    networks = [after_short_training(candidate["canonical_path"], data) for candidate in before]
    other = opened(paint_disagreement(networks, tmp_path / "images"), 8, 3, check_duplicates=False)
    data = replace(data, val=other.val, _test=other.test())
    compared, chosen = candidates(shutil.copytree(searched, tmp_path / "run"), data)
    assert [candidate["path"] for candidate in compared] == [candidate["path"] for candidate in before]
    assert [candidate["val_top1"] for candidate in compared] == [0, 1, 0]
    assert chosen == compared[1]["path"]
