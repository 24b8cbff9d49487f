"""Tests of the retraining loop, observed step by step from inside of the network."""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from greedynas import GreedyNASError, build_network
from greedynas.models.losses import classification_loss, distillation_loss, teacher_logits
from greedynas.models.model_file import load_network
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import torch_stream
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages import network_training
from greedynas.stages.network_training import RetrainState, retrain
from greedynas.stages.recipes import make_optimizer, make_recipe, make_schedule
from greedynas.stages.retrain import retrain_stage
from greedynas.stages.run import Run
from greedynas.stages.testing import predict_logits, top_accuracy
from tests.helpers.pictures import opened
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


def new_network(classes, dropout=0.0):
    space = tiny_space()
    return build_network("2111", space, num_classes=classes, dropout=dropout, generator=torch_stream(0, "retrain init"))


def plain_colours(folder, counts):
    """Write an image folder with pictures of one colour per class: 0 for the first class, 255 for the last."""
    for level, (name, count) in zip(np.linspace(0, 255, len(counts)), counts.items(), strict=True):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.full((8, 8, 3), round(level), np.uint8)).save(folder / name / f"{i}.png")
    return folder


def recipe_of(**settings):
    return make_recipe(RetrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.2, "dropout": 0, **settings}))


def test_dropout_drops_different_features_at_every_step(data):
    network, kept = new_network(3, dropout=0.5), []
    network.dropout.register_forward_hook(lambda _, inputs, output: kept.append((inputs[0] != 0, output != 0)))
    retrain(network, data.train, recipe_of(dropout=0.5, batch_size=14))
    assert len(kept) == 9  # three steps an epoch
    assert all(0.3 < after[before].float().mean() < 0.7 for before, after in kept)
    # The masks of two steps agree on half of the features that were not 0 in both steps, not on all of them.
    for i, (before, after) in enumerate(kept):
        for earlier_before, earlier_after in kept[:i]:
            both = before & earlier_before
            assert (after == earlier_after)[both].float().mean() < 0.7


@pytest.mark.parametrize("steps", [1, 2])
def test_images_are_mixed_in_different_shares_at_every_step(tmp_path, steps):
    """Check the two greys of a mixture of black and white images: its share, and one minus the share."""
    images = opened(
        plain_colours(tmp_path, {"black": 10, "white": 10}), 8, 3, val_images=2, test_images=2, augment="none"
    )
    network, shares = new_network(2), []

    def look(_, arguments):
        greys = images.train.view.pixels(arguments[0])[:, 0, 0, 0].unique().tolist()
        assert set(greys) - {0, 255}
        shares.append(min(set(greys) - {0, 255}))

    network.register_forward_pre_hook(look)
    retrain(network, images.train, recipe_of(epochs=6 // steps, batch_size=16 // steps, mixup=5.0))
    assert len(shares) == 6
    assert len(set(shares)) == 6


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_class_weights_of_the_run_enter_its_retrainings(tmp_path, weights):
    """Check training on equal images, from which a network can learn only the weights of the classes."""
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


def test_a_student_learns_from_labels_and_teacher_by_the_share_of_each(data):
    recipe, images = recipe_of(epochs=2, teacher_weight=0.3, temperature=2.0, label_smoothing=0.1), data.train
    network, teacher = new_network(3), new_network(3).eval().requires_grad_(False)
    teacher.classifier.weight.data *= 30  # a confident teacher
    by_hand = deepcopy(network).train()
    found, state = retrain(network, images, recipe, teacher=teacher)
    optimizer, steps = make_optimizer(by_hand, recipe), images.steps_per_epoch(8)
    schedule = make_schedule(optimizer, recipe, steps)
    for step in range(2 * steps):
        batch, labels = list(images.train_batches(step // steps, 8))[step % steps]
        schedule.step_update(step)
        logits = by_hand(batch)
        labelled, taught = (
            classification_loss(logits, labels, None, 0.1),
            distillation_loss(logits, teacher_logits(teacher, batch, "fp32"), 2.0),
        )
        optimizer.zero_grad()
        (0.7 * labelled + 0.3 * taught).backward()
        optimizer.step()
    assert state.step == 2 * steps
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)


def test_student_and_teacher_run_in_the_requested_precision(data):
    networks, seen = [new_network(3), new_network(3).eval()], []
    for network in networks:
        network.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for precision in ("bf16", "fp32"):
        retrain(
            networks[0], data.train, recipe_of(epochs=1, teacher_weight=0.5), precision=precision, teacher=networks[1]
        )
    half = len(seen) // 2
    assert seen == [True] * half + [False] * half


def test_the_last_image_of_an_odd_batch_has_no_partner_to_mix_with(data):
    seen = 0
    network = new_network(3)

    def count(_, arguments):
        nonlocal seen
        seen += len(arguments[0])

    network.register_forward_pre_hook(count)
    for mixup, batch in ((0.2, 8), (0.0, 9)):
        seen = 0
        _, state = retrain(network, data.train, recipe_of(epochs=1, batch_size=9, mixup=mixup))
        assert state.optimization_images == seen == state.step * batch


def test_the_default_seed_of_a_training_is_0(data):
    start = new_network(3)
    (first, _), (second, state), (other, _) = (
        retrain(deepcopy(start), data.train, recipe_of(epochs=1), **seed) for seed in ({}, {"seed": 0}, {"seed": 1})
    )
    weights = [network.classifier.weight for network in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert RetrainState().seconds == 0 < state.seconds


def test_dropout_is_seeded_where_the_images_are(data, monkeypatch):
    devices, real = [], network_training.seeded_generators
    monkeypatch.setattr(
        network_training, "seeded_generators", lambda *key, device: devices.append(device) or real(*key, device=device)
    )
    _, state = retrain(new_network(3), data.train, recipe_of(epochs=1))
    assert devices == [torch.device("cpu")] * state.step


def test_several_ranks_need_two_images_each_and_share_statistics_only_on_request(data, monkeypatch):
    synchronised = []
    monkeypatch.setattr(network_training, "synchronise", synchronised.append)
    network = new_network(3)
    retrain(network, data.train, recipe_of(epochs=1))
    assert synchronised == []
    retrain(network, data.train, recipe_of(epochs=1), sync_bn=True)
    assert synchronised == [network]
    monkeypatch.setattr(ranks, "size", lambda: 5)
    with pytest.raises(GreedyNASError, match=r"retrain.batch_size gives 8 images for 5 ranks"):
        retrain(network, data.train, recipe_of(epochs=1))


class Killed(BaseException):
    """An exception that is not caught, like kill -9."""


def test_a_training_killed_between_the_last_step_of_an_epoch_and_its_metrics_is_resumed(data, tmp_path, monkeypatch):
    def lines(folder):
        retrain(new_network(3), data.train, recipe_of(checkpoint_steps=1), folder=folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["kind"], row["step"], row["epoch"], row["loss"], row["lr"]) for row in rows]

    def die(_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(network_training.RetrainJournal, "epoch", die)
        with pytest.raises(Killed):
            lines(tmp_path / "killed")
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def test_images_are_augmented_as_the_recipe_says(data):
    recipe = recipe_of(epochs=2, randaugment="rand-m9-mstd0.5", erasing=0.5)
    network, seen = new_network(3), []
    network.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))
    retrain(network, data.train, recipe, seed=4)
    images = data.train.seen(seed=4, randaugment=recipe.randaugment, erasing=0.5)
    expected = [batch for epoch in range(2) for batch, _ in images.train_batches(epoch, 8)]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    plain = data.train.seen(seed=4, erasing=0.5)
    assert not torch.equal(seen[0], next(iter(plain.train_batches(0, 8)))[0])


def test_every_rank_starts_with_the_same_weights_and_drops_its_own_features(data, monkeypatch):
    begun, keys, real = [], [], network_training.seeded_generators
    monkeypatch.setattr(network_training, "broadcast_weights", begun.append)
    monkeypatch.setattr(
        network_training, "seeded_generators", lambda *key, **options: keys.append(key) or real(*key, **options)
    )
    network = new_network(3)
    for rank, own in ((0, ()), (3, (3,))):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        begun.clear()
        keys.clear()
        _, state = retrain(network, data.train, recipe_of(epochs=1))
        assert begun == [network]
        assert keys == [(0, "dropout", step, *own) for step in range(state.step)]


def test_a_network_in_evaluation_mode_is_trained_like_any_other(data):
    one, other = (
        retrain(network, data.train, recipe_of(epochs=1))[0] for network in (new_network(3).eval(), new_network(3))
    )
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_progress_is_shown_relative_to_all_steps():
    recipe = recipe_of(epochs=3)
    optimizer = make_optimizer(new_network(3), recipe)
    schedule = make_schedule(optimizer, recipe, 5)
    with network_training.RetrainJournal(
        None, RetrainState(step=4), recipe, 5, optimizer, schedule, "retraining", None
    ) as journal:
        progress = journal._progress
    assert (progress.done, progress.total) == (4, 15)


def test_a_validation_changes_no_weight_and_gives_an_accuracy_after_every_epoch(data, tmp_path):
    recipe = recipe_of(epochs=3, ema=0.9, dropout=0.2)
    one, _ = retrain(new_network(3), data.train, recipe, folder=tmp_path / "one", validation=data.val)
    other, _ = retrain(new_network(3), data.train, recipe, folder=tmp_path / "other")
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["val_accuracy"] for row in rows if row["kind"] == "epoch"]
    assert len(accuracies) == 3
    assert accuracies[-1] == top_accuracy(*predict_logits(one, data.val))
    assert "val_accuracy" not in (tmp_path / "other" / "metrics.jsonl").read_text()
