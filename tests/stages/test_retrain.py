"""Tests of the retraining loop, and of the stage on a run directory with a small trained supernet."""

import io
import json
import math
import pickle
import shutil
import subprocess
import sys
from copy import copy, deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from torch.nn import functional as F

from greedynas import GreedyNASError, build_network
from greedynas.data.loader import ImageSet
from greedynas.models.model_file import load_network
from greedynas.models.supernet import Supernet
from greedynas.rundir.checkpoints import load_weights
from greedynas.rundir.schemas import unpack_bits
from greedynas.runtime.cpu.depthwise import QuickDepthwise
from greedynas.runtime.rng import torch_stream
from greedynas.settings.recipes import RECIPES, Recipe
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.spaces.paths import canonical
from greedynas.stages import network_training
from greedynas.stages import retrain as retraining
from greedynas.stages.network_choice import choose_target
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import cosine_schedule, make_optimizer, make_recipe, make_schedule
from greedynas.stages.retrain import report_retraining, retrain_stage
from greedynas.stages.run import Run, read_run_config
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.train import train_stage
from tests.helpers.killing import ENVIRONMENT
from tests.helpers.latency import made_up
from tests.helpers.paths import ROOT
from tests.helpers.plugins import registered
from tests.helpers.retraining import DATA, new_network
from tests.helpers.training import SETTINGS, same_tensors, snapshot, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

WALL_CLOCK = {"seconds", "images_per_second"}
SMALL = {"epochs": 3, "batch_size": 10, "log_every": 3, "lr": 0.2}
STRONG = {"randaugment": "rand-m9-mstd0.5", "mixup": 0.4, "cutmix": 1.0, "erasing": 0.3}


def settings_of(**changes):
    return RetrainSettings(**{**SMALL, **changes})


def trained(data, folder=None, network=None, seed=0, **changes):
    recipe = make_recipe(settings_of(**changes))
    network = network or new_network(recipe.dropout)
    return retrain(network, data.train_and_val(), recipe, seed=seed, folder=folder)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_wall_clock(rows):
    return [{key: value for key, value in row.items() if key not in WALL_CLOCK} for row in rows]


# The loop


def test_the_loop_equals_one_written_by_hand(data):
    recipe = make_recipe(settings_of(dropout=0, clip_grad=0.5, ema=0.9, warmup_epochs=0.4))
    network, images = new_network(), data.train_and_val()
    by_hand = deepcopy(network).train()
    found, state = retrain(network, images, recipe, seed=0)
    assert (state.step, state.epoch, state.optimization_images) == (15, 3, 150)  # of 54 images, four are left out
    optimizer = make_optimizer(by_hand, recipe)
    schedule, average, step = make_schedule(optimizer, recipe, 5), ModelEmaV3(by_hand, 0.9, use_warmup=True), 0
    for epoch in range(3):
        for batch, labels in images.train_batches(epoch, 10):
            schedule.step_update(step)
            optimizer.zero_grad()
            with QuickDepthwise():  # whose gradients differ in their last digits
                logits = by_hand(batch)
            F.cross_entropy(logits, labels, label_smoothing=0.1).backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimizer.step()
            step += 1
            average.update(by_hand, step)
    assert same_tensors(found.state_dict(), average.module.state_dict())
    assert not same_tensors(network.state_dict(), found.state_dict())
    assert same_tensors(network.state_dict(), by_hand.state_dict())
    assert not any(module.training for module in found.modules())


def test_the_average_forgets_the_initial_weights(data):
    """Check the warm-up of the average, which after 15 steps would otherwise consist mostly of the initial weights."""
    start, network = new_network(), new_network()
    found, _ = trained(data, network=network, ema=0.999)
    weight = "classifier.weight"
    distance = (found.state_dict()[weight] - network.state_dict()[weight]).norm()
    assert distance < 0.5 * (start.state_dict()[weight] - network.state_dict()[weight]).norm()


def test_metrics(data, tmp_path):
    trained(data, tmp_path)
    rows = rows_of(tmp_path)
    assert [(row["kind"], row["step"], row["epoch"]) for row in rows] == [
        *(("step", step, 0) for step in (3, 5)),
        ("epoch", 5, 1),
        *(("step", step, 1) for step in (6, 9, 10)),
        ("epoch", 10, 2),
        *(("step", step, 2) for step in (12, 15)),
        ("epoch", 15, 3),
    ]
    steps, epochs = ([row for row in rows if row["kind"] == kind] for kind in ("step", "epoch"))
    assert set(steps[0]) == {"kind", "step", "epoch", "loss", "lr", "images_per_second", "seconds"}
    assert set(epochs[0]) == {"kind", "step", "epoch", "loss", "lr"}
    lr = 0.2 * 10 / 256
    assert [row["lr"] for row in epochs] == pytest.approx(
        [lr / 2 * (1 + math.cos(math.pi * n / 15)) for n in (4, 9, 14)]
    )
    assert epochs[0]["loss"] == pytest.approx((3 * steps[0]["loss"] + 2 * steps[1]["loss"]) / 5)
    assert epochs[1]["loss"] == pytest.approx((steps[2]["loss"] + 3 * steps[3]["loss"] + steps[4]["loss"]) / 5)


class Stop(BaseException):
    """An exception that is not caught, like kill -9."""


def interrupted(data, folder, at, monkeypatch, **changes):
    """Run a training that is interrupted in the middle of its update number `at`."""
    real, calls = network_training.seeded_generators, []

    def dying(*arguments, **options):
        calls.append(arguments)
        if len(calls) == at:
            raise Stop
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(network_training, "seeded_generators", dying)
        with pytest.raises(Stop):
            trained(data, folder, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": "sgd", "dropout": 0.3},
        {"recipe": "rmsprop", "ema": 0.9, "dropout": 0.3, "warmup_epochs": 1},
        {"recipe": "sgd", "ema": 0.9, **STRONG},
        {"recipe": "rmsprop", "momentum": 0, "ema": 0},
    ],
    ids=["sgd", "rmsprop", "augmented", "plain"],
)
def test_interrupted_and_resumed_equals_uninterrupted(data, tmp_path, monkeypatch, changes):
    whole, _ = trained(data, tmp_path / "whole", **changes)
    plain, _ = trained(data, **changes)  # writing checkpoints does not change the training
    assert same_tensors(whole.state_dict(), plain.state_dict())
    for at in (2, 5, 7):  # before the first checkpoint; at the end of an epoch; within one
        interrupted(data, tmp_path / "broken", at, monkeypatch, checkpoint_steps=3, **changes)
    found, state = trained(data, tmp_path / "broken", checkpoint_steps=3, **changes)
    assert same_tensors(whole.state_dict(), found.state_dict())
    assert without_wall_clock(rows_of(tmp_path / "whole")) == without_wall_clock(rows_of(tmp_path / "broken"))
    assert (state.step, state.epoch) == (15, 3)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    again, _ = trained(data, tmp_path / "broken", checkpoint_steps=3, **changes)  # the training is finished
    assert same_tensors(found.state_dict(), again.state_dict())
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


# Recipes of plugins


def adamw(network, recipe):
    return torch.optim.AdamW(network.parameters(), recipe.lr, weight_decay=recipe.weight_decay)


class Counting(torch.optim.SGD):
    """An optimizer with numbers in its state that are not tensors: the steps of a parameter, and half of them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                memory = self.state[parameter]
                memory["count"] = memory.get("count", 0) + 1
                memory["half"] = memory.get("half", 0.0) + 0.5
                assert isinstance(memory["count"], int)
                group["momentum"] = 0.5 + 0.4 / (memory["count"] + memory["half"])
        return super().step(closure)


class Halving:
    """A minimal schedule."""

    def __init__(self, optimizer, recipe, steps_per_epoch):
        self.groups, self.lr, self.steps = optimizer.param_groups, recipe.lr, steps_per_epoch

    def step_update(self, num_updates):
        for group in self.groups:
            group["lr"] = self.lr / 2 ** (num_updates // self.steps)


NUMBERS = {"epochs": 2, "batch_size": 10, "lr": 1e-3, "weight_decay": 0.01}


def counting(network, recipe):
    return Counting(network.parameters(), recipe.lr, momentum=0.9)


PLUGIN = {
    "adamw": Recipe(NUMBERS, adamw, cosine_schedule),
    "counting": Recipe(NUMBERS, counting, Halving, extensible=True),
}


@pytest.mark.parametrize("recipe", PLUGIN)
def test_a_recipe_of_a_plugin_is_resumed_exactly(data, tmp_path, monkeypatch, recipe):
    changes = {"recipe": recipe, "lr": 1e-2, "ema": 0.9}
    with registered(RECIPES, **PLUGIN):
        whole, _ = trained(data, tmp_path / "whole", **changes)
        for at in (2, 5, 7):
            interrupted(data, tmp_path / "broken", at, monkeypatch, checkpoint_steps=3, **changes)
        found, state = trained(data, tmp_path / "broken", checkpoint_steps=3, **changes)
    assert state.step == 15
    assert same_tensors(whole.state_dict(), found.state_dict())
    assert without_wall_clock(rows_of(tmp_path / "whole")) == without_wall_clock(rows_of(tmp_path / "broken"))


def test_an_optimizer_state_that_no_checkpoint_can_hold_is_refused(data, tmp_path):
    class Wordy(Counting):
        def step(self, closure=None):
            super().step(closure)
            for memory in self.state.values():
                memory["notes"] = ["it went well"]

    wordy = Recipe(NUMBERS, lambda network, recipe: Wordy(network.parameters(), recipe.lr), Halving)
    with (
        registered(RECIPES, wordy=wordy),
        pytest.raises(GreedyNASError, match="the state of Wordy has 'notes', a list: a checkpoint can hold only"),
    ):
        trained(data, tmp_path, recipe="wordy")


def test_seeds_and_dropout(data):
    """Check that every random number comes from (seed, purpose, counter), without use of the global generators."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, _ = trained(data, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, _ = trained(data, dropout=0.5)
    assert same_tensors(first.state_dict(), second.state_dict())
    other, _ = trained(data, dropout=0.5, seed=1)
    assert not same_tensors(first.state_dict(), other.state_dict())
    without, _ = trained(data, dropout=0.0)
    assert not same_tensors(first.state_dict(), without.state_dict())


def test_class_weights(data):
    recipe, weights = make_recipe(settings_of(epochs=1, dropout=0)), torch.tensor([2.0, 0.5, 0.5])
    results = [
        retrain(new_network(), data.train_and_val(), recipe, class_weights=given)[0] for given in (None, weights)
    ]
    assert not same_tensors(*(network.state_dict() for network in results))


def test_divergence_is_one_line_and_keeps_the_last_good_checkpoint(data, tmp_path):
    with pytest.raises(GreedyNASError) as error:
        trained(data, tmp_path, lr=1e30, checkpoint_steps=1, label_smoothing=0)
    assert "diverged: the loss is not a number at step" in str(error.value)
    assert "train with a lower retrain.lr, or with retrain.clip_grad" in str(error.value)
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert files
    assert all(tensor.isfinite().all() for file in files for tensor in load_file(file).values())


def test_a_student_with_all_the_weight_on_its_teacher_ignores_labels(data):
    teacher = new_network(seed=5).eval().requires_grad_(False)
    before = snapshot(teacher)
    images = data.train_and_val()
    source = copy(images._shelf.source)
    source.labels = source.labels[::-1].copy()
    wrong = ImageSet(replace(images._shelf, source=source), images._rows)
    assert not torch.equal(wrong.labels, images.labels)
    full, half = (make_recipe(settings_of(teacher_weight=weight)) for weight in (1.0, 0.5))
    first, second = (retrain(new_network(), each, full, teacher=teacher)[0] for each in (images, wrong))
    assert same_tensors(first.state_dict(), second.state_dict())
    third, fourth = (retrain(new_network(), each, half, teacher=teacher)[0] for each in (images, wrong))
    assert not same_tensors(third.state_dict(), fourth.state_dict())
    assert same_tensors(snapshot(teacher), before)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_it_learns():
    """Check that three epochs on a seventh of the embedded sample lead to far better results than chance."""
    from tests.helpers.pictures import opened

    data = opened(val_images=6900, augment="none")
    network = build_network("1111111", "fashion", generator=torch_stream(0, "retrain init"))
    recipe = make_recipe(RetrainSettings(epochs=3, batch_size=50, lr=1.0, dropout=0))
    network, _ = retrain(network.to(memory_format=torch.channels_last), data.train, recipe)
    images, labels = data.val.eval_batch(np.arange(1000))
    with torch.no_grad():
        assert (network(images).argmax(1) == labels).float().mean() > 0.5


# The stage


@pytest.fixture(scope="module")
def searched(photos, tmp_path_factory):
    """Make a run with a trained supernet and two searches, in copies of which the tests retrain."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    config = Config(name="tiny", space=tiny_space(), data={**DATA, "source": str(photos)}, train=SETTINGS)
    train_stage(config, folder, Console(quiet=True))
    limits = {"macs": (["60K", "50K"], None), "params": (None, None), "latency_ms": (None, None)}
    requests = make_requests(folder, limits, "evolution", (), True, None, ["population=6", "generations=4"], None)
    search_stage(folder, requests, None, Console(quiet=True))
    return folder


@pytest.fixture
def run(searched, tmp_path):
    return shutil.copytree(searched, tmp_path / "run")


def stage(run, settings=None, **options):
    settings = {**SMALL, "epochs": 2, **(settings or {})}
    return retrain_stage(run, Console(quiet=True), settings=RetrainSettings(**settings), **options)


def read(file):
    return json.loads(file.read_text())


def content(run):
    files = (file for file in run.rglob("*") if file.is_file() and file.name not in (".lock", "log.txt"))
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def refused(run, message, settings=None, **options):
    """Check that a retraining is refused in one line and that nothing is written."""
    before = content(run)
    with pytest.raises(GreedyNASError, match=message) as error:
        stage(run, settings, **options)
    assert "\n" not in str(error.value)
    assert content(run) == before
    assert not list(run.rglob("*.tmp"))


def test_the_chosen_network(run):
    found = read(run / "arch.json")
    result = stage(run, {"ema": 0.9})
    home = run / "models" / "macs-60K"
    arch, test = read(home / "arch.json"), read(home / "test.json")
    assert found.items() <= arch.items()
    assert read(run / "arch.json") == arch
    assert (run / "model.safetensors").read_bytes() == (home / "model.safetensors").read_bytes()
    assert arch.items() <= result.items()
    assert (arch["model"], arch["recipe"], arch["epochs"]) == ("macs-60K", "sgd", 2)
    assert (arch["test_top1"], arch["test_top5"], arch["test_macro"]) == (test["top1"], None, test["macro"])
    assert not WALL_CLOCK & arch.keys()
    # The exported weights are the averaged ones.
    network, card = load_network(home / "model.safetensors")
    saved = load_file(sorted((home / "checkpoints").iterdir())[-1])
    assert same_tensors(network.state_dict(), {k[4:]: t for k, t in saved.items() if k.startswith("ema.")})
    assert not same_tensors(network.state_dict(), {k[4:]: t for k, t in saved.items() if k.startswith("net.")})
    assert (card.name, card.class_names, card.image_size, card.crop_fraction) == ("macs-60K", ("a", "b", "c"), 8, 1.0)
    assert list(card.path) == arch["canonical_path"]
    console = Console(file=io.StringIO(), width=200)
    report_retraining(result, console)
    printed = console.file.getvalue()
    for part in (
        f"{arch['test_top1']:.2%}",
        f"{arch['macs']:,}",
        " ".join(arch["ops"]),
        "on 6 test images, evaluated once after the training",
    ):
        assert part in printed


def test_test_results(run):
    result = stage(run)
    test = read(run / "models" / "macs-60K" / "test.json")
    with Run.open(run) as opened:
        config = opened.config()
    from greedynas.stages.run import read_data

    images, labels = read_data(config, torch.device("cpu")).test().eval_batch()
    network, _ = load_network(run / "model.safetensors")
    with torch.no_grad():
        probabilities = network(images).softmax(1)
    predicted = probabilities.argmax(1)
    assert test["images"] == 6
    assert test["class_names"] == ["a", "b", "c"]
    assert test["top1"] == pytest.approx((predicted == labels).float().mean().item())
    assert test["loss"] == pytest.approx(F.nll_loss(probabilities.log(), labels).item(), rel=1e-5)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels.numpy(), predicted.numpy()), 1)
    assert test["confusion"] == confusion.tolist()
    assert unpack_bits(test["correct"], 6).tolist() == (predicted == labels).tolist()
    assert test["per_class"] == pytest.approx((confusion.diagonal() / confusion.sum(1)).tolist())
    assert test["macro"] == pytest.approx(np.mean(test["per_class"]))
    assert len(test["samples"]) == 6  # no image twice
    for sample in test["samples"]:
        assert sample["image"].startswith("data:image/png;base64,")
        assert sample["probability"] == pytest.approx(sample["top"][0][1])
        assert sample["predicted"] == sample["top"][0][0]
        assert sum(p for _, p in sample["top"]) == pytest.approx(1)
    assert result["test_loss"] == test["loss"]


def test_a_finished_model_is_unchanged_and_the_test_set_is_evaluated_once(run, monkeypatch):
    looks = []
    real = retraining.assess
    monkeypatch.setattr(retraining, "assess", lambda *given: looks.append(1) or real(*given))
    first = stage(run)
    before = content(run)
    assert stage(run) == first
    assert content(run) == before
    assert looks == [1]
    # After a kill behind test.json, missing files are restored from the checkpoint and from test.json.
    for name in ("models/macs-60K/model.safetensors", "model.safetensors"):
        (run / name).unlink()
    bare = {k: v for k, v in first.items() if not k.startswith("test_")}
    for name in ("models/macs-60K/arch.json", "arch.json"):
        (run / name).write_text(json.dumps({k: v for k, v in bare.items() if k not in ("recipe", "epochs", "seconds")}))
    assert stage(run) == first
    assert content(run).keys() == before.keys()
    assert {k: v for k, v in content(run).items() if k.endswith("safetensors")} == {
        k: v for k, v in before.items() if k.endswith("safetensors")
    }
    assert read(run / "arch.json") == read(run / "models" / "macs-60K" / "arch.json")
    assert read(run / "arch.json")["test_top1"] == first["test_top1"]
    assert looks == [1]


def test_training_uses_train_and_validation_images_and_never_the_test_set(run, monkeypatch):
    seen = []
    real = network_training.retrain

    def watched(network, images, *arguments, **options):
        seen.append(images)
        return real(network, images, *arguments, **options)

    monkeypatch.setattr("greedynas.stages.retrain.retrain", watched)
    stage(run, {"top": 2})
    assert [len(images) for images in seen] == [42, 42, 54]


def test_other_networks(run):
    found = read(run / "arch.json")
    other = stage(run, model="macs-50K")
    assert other["model"] == "macs-50K"
    assert other["macs"] <= 50_000
    path = stage(run, arch="2 1 0 MB2_K3".replace("MB2_K3", "1"))
    assert (path["model"], path["path"], path["ops"]) == ("2101", [2, 1, 0, 1], ["MB3_K3_SE", "MB2_K3", "ID", "MB2_K3"])
    named = stage(run, arch="ID MB2_K3 ID MB2_K3", name="mine")
    assert named["model"] == "mine"
    assert "supernet_accuracy" not in named
    assert read(run / "arch.json") == found  # the chosen one is still the chosen one
    assert not (run / "model.safetensors").exists()
    assert sorted(file.name for file in (run / "models").iterdir()) == ["2101", "macs-50K", "macs-60K", "mine"]


# A random network


def drawn(run, seed=0, model=None, latency_table=None):
    return choose_target(run, read_run_config(run), model, "random", None, None, seed, latency_table)


ALL = np.array(list(product(range(3), repeat=4)))  # the paths of the tiny space


def limited(run, name, share):
    """Give a finished search a budget that this share of all paths keeps, and return the budget."""
    limit = int(np.quantile(tiny_space().costs(ALL).macs, share))
    file = run / "searches" / name / "search.json"
    file.write_text(json.dumps({**read(file), "budget": {"max_macs": limit}}))
    return limit


def test_a_random_network_is_trained_in_addition_to_the_found_one(run):
    found, limit = read(run / "arch.json"), limited(run, "macs-60K", 0.5)
    result = stage(run, arch="random")
    arch = read(run / "models" / "random" / "arch.json")
    assert (arch["model"], arch["within"], arch["epochs"]) == ("random", "macs-60K", 2)
    assert arch["macs"] == tiny_space().costs([arch["path"]]).macs[0] <= limit
    assert arch["canonical_path"] != found["canonical_path"]
    assert "supernet_accuracy" not in arch
    assert tuple(arch["path"]) == drawn(run).path
    assert read(run / "arch.json") == found  # the found one is still the chosen one
    before = content(run)
    assert stage(run, model="random") == stage(run, arch="random") == result
    assert content(run) == before
    again = choose_target(run, read_run_config(run), "random", None, None, None)
    assert (again.path, again.facts) == (drawn(run).path, {"within": "macs-60K"})


def test_random_networks_keep_the_budget_of_a_search_and_differ_from_its_network(run):
    space = tiny_space()
    for name, share in (("macs-60K", 0.6), ("macs-50K", 0.2)):
        limit, found = limited(run, name, share), read(run / "models" / name / "arch.json")
        paths = [drawn(run, seed, name).path for seed in range(100)]
        within = {canonical(path, space) for path in ALL[space.costs(ALL).macs <= limit].tolist()}
        networks = {canonical(path, space) for path in paths}
        assert networks <= within
        assert len(networks) > 0.7 * len(within)  # almost every path
        assert tuple(found["canonical_path"]) not in networks
    file = run / "models" / "macs-50K" / "arch.json"
    other = {**found, "path": list(paths[0]), "canonical_path": list(canonical(paths[0], space))}
    file.write_text(json.dumps(other))  # as after retraining with --top
    again = canonical(drawn(run, 0, "macs-50K").path, space)
    assert again not in (canonical(paths[0], space), tuple(found["canonical_path"]))


def test_the_budget_of_a_random_network_is_counted_with_the_classes_of_the_data(run):
    limit = limited(run, "macs-60K", 0.8)
    file = run / "searches" / "macs-60K" / "search.json"
    search = read(file)
    search["chosen"]["num_classes"] = 100  # 97 rows of 16 weights more than with 3 classes
    file.write_text(json.dumps(search))
    paths = [drawn(run, seed).path for seed in range(40)]
    assert tiny_space().costs(paths).macs.max() <= limit - 97 * 16
    assert (tiny_space().costs(ALL).macs > limit - 97 * 16).mean() > 0.2  # without the budget, some would cost more


def test_a_random_network_within_a_limit_on_latency(run, tmp_path):
    table = made_up(tiny_space())
    table.save(tmp_path / "table.json")
    limits = {"macs": (None, None), "params": (None, None), "latency_ms": (["12ms"], None)}
    small = ["population=6", "generations=2"]
    requests = make_requests(run, limits, "evolution", (), True, "quick", small, None)
    search_stage(run, requests, tmp_path / "table.json", Console(quiet=True))
    refused(run, "limits latency, but .* is missing; name its table with --latency-table", arch="random")
    targets = [drawn(run, seed, latency_table=tmp_path / "table.json") for seed in range(20)]
    latencies = table.cost_table(tiny_space())(np.array([target.path for target in targets])).tolist()
    assert [target.facts["latency_ms"] for target in targets] == latencies
    assert max(latencies) <= 12 < table.cost_table(tiny_space()).range[1] - 1
    table.save(run / "latency.json")  # as in a job that measures the table
    assert drawn(run).path == targets[0].path
    made_up(tiny_space(), constant_ms=1.0).save(run / "latency.json")
    refused(run, "is not the table of the search quick", arch="random")


def test_a_budget_without_another_network_is_refused(run):
    (run / "searches" / "macs-60K" / "search.json").rename(run / "search.json")
    refused(run, "macs-60K was not found by a search of this run, whose budget --arch random needs", arch="random")
    search = read(run / "search.json")
    only = {"path": [0, 0, 0, 0], "canonical_path": [0, 0, 0, 0]}
    search |= {"chosen": search["chosen"] | only, "budget": {"max_macs": tiny_space().cost_tables["macs"].range[0]}}
    (run / "searches" / "macs-60K" / "search.json").write_text(json.dumps(search))
    refused(run, "only the found network keeps the budget of macs-60K", arch="random")


def test_a_run_without_a_search_has_no_budget_to_draw_within(run, run_cli):
    (run / "arch.json").unlink()
    code, out, err = run_cli("retrain", run, "--arch", "random")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "has no chosen network yet; find one with greedynas search" in err


def test_a_timm_model(run):
    result = stage(run, {"epochs": 1}, arch="timm:mobilenetv3_small_050")
    assert (result["model"], result["timm"]) == ("timm-mobilenetv3_small_050", "mobilenetv3_small_050")
    assert not {"space", "path", "ops"} & result.keys()
    reference = timm.create_model("mobilenetv3_small_050", num_classes=3)
    assert result["params"] == sum(p.numel() for p in reference.parameters())
    network, card = load_network(run / "models" / "timm-mobilenetv3_small_050" / "model.safetensors")
    assert card.timm == "mobilenetv3_small_050"
    assert 0 < result["macs"] < 1e6  # at 8 px
    hooked = []
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda m, _, out: hooked.append(out[0].numel() * m.weight[0].numel()))
    network(torch.zeros(1, 3, 8, 8))
    linear = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert result["macs"] == sum(hooked) + sum(module.weight.numel() for module in linear)


def test_a_network_inherits_the_weights_of_the_evaluated_path(run):
    """Check this where (ID, MB) and (MB, ID) are one network with two sets of weights."""
    recipe = {"epochs": 1, "lr": 1e-12, "dropout": 0, "weight_decay": 0, "inherit": True}
    for path in ("0110", "1010"):
        result = stage(run, recipe, arch=path, name=f"from-{path}")
        assert result["canonical_path"] == [1, 0, 1, 0]
        assert result["inherit"]
        network, _ = load_network(run / "models" / f"from-{path}" / "model.safetensors")
        supernet = Supernet(tiny_space())
        with Run.open(run) as opened:
            load_weights(supernet, opened.load_checkpoint()[0])
        expected = dict(supernet.subnet([int(op) for op in path]).named_parameters())
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-9)


def test_top_chooses_on_validation_images(run, monkeypatch):
    """Check that short trainings use training images, the choice validation images, and nothing is trained twice."""
    accuracies = iter([0.3, 0.9, 0.9])
    monkeypatch.setattr("greedynas.stages.retrain.top_accuracy", lambda *_: next(accuracies))
    chosen = read(run / "arch.json")
    result = stage(run, {"top": 3, "top_epochs": 1})
    candidates = read(run / "models" / "macs-60K" / "top.json")["candidates"]
    assert [candidate["val_top1"] for candidate in candidates] == [0.3, 0.9, 0.9]
    assert candidates[0]["path"] == chosen["path"]
    assert len({tuple(candidate["canonical_path"]) for candidate in candidates}) == 3
    assert all(candidate["macs"] <= 60_000 for candidate in candidates)
    found = sorted(read(run / "searches" / "macs-60K" / "search.json")["found"], key=lambda entry: -entry["accuracy"])
    assert candidates[0]["supernet_accuracy"] == chosen["supernet_accuracy"]
    assert all(c["supernet_accuracy"] >= found[-1]["accuracy"] for c in candidates)
    best = min(candidates[1:], key=lambda candidate: candidate["val_loss"])
    assert result["path"] == best["path"]
    assert result["supernet_accuracy"] == best["supernet_accuracy"]
    assert read(run / "arch.json") == read(run / "models" / "macs-60K" / "arch.json")
    assert read(run / "arch.json")["path"] == best["path"]
    assert not (run / "models" / "macs-60K" / "top").exists()
    before = content(run)
    assert stage(run, {"top": 3, "top_epochs": 1}) == result  # no accuracy is evaluated again
    assert content(run) == before


def test_a_finished_short_training_is_not_repeated(run, searched, tmp_path, monkeypatch):
    settings = {"top": 3, "top_epochs": 2, "checkpoint_steps": 2}
    expected = stage(shutil.copytree(searched, tmp_path / "whole"), settings)
    real, steps = network_training.seeded_generators, []

    def counting(*arguments, **options):
        steps.append(arguments)
        if len(steps) == 13:  # within the second of three short trainings of eight steps
            raise Stop
        return real(*arguments, **options)

    monkeypatch.setattr(network_training, "seeded_generators", counting)
    with pytest.raises(Stop):
        stage(run, settings)
    assert len(read(run / "models" / "macs-60K" / "top.json")["candidates"]) == 1
    result = stage(run, settings)
    assert {**result, "seconds": 0} == {**expected, "seconds": 0}
    assert len(steps) == 1 + 3 * 8 + 10  # one was started twice
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_recipe_of_a_plugin_in_a_run(run):
    settings = {"recipe": "counting", "epochs": None, "lr": None, "batch_size": None, "warmup_epochs": None}
    with registered(RECIPES, **PLUGIN):
        result = stage(run, settings)
        assert (result["recipe"], result["epochs"]) == ("counting", 2)
        request = read(run / "models" / "macs-60K" / "retrain.json")["recipe"]
        assert (request["name"], request["lr"], request["momentum"]) == ("counting", 1e-3, None)
        lrs = [row["lr"] for row in rows_of(run / "models" / "macs-60K") if row["kind"] == "epoch"]
        assert lrs == [1e-3, 5e-4]
        assert stage(run, {**settings, "epochs": 3})["epochs"] == 3  # the recipe is declared extensible
        refused(run, "retrain.momentum is a setting of sgd and rmsprop; the recipe is counting", {**settings, "momentum": 0.5})  # fmt: skip
        stage(run, {**settings, "recipe": "adamw"}, name="adamw")
        refused(run, r"recipe\.epochs is 2 there, 3 here", {**settings, "recipe": "adamw", "epochs": 3}, name="adamw")
    with pytest.raises(GreedyNASError, match="unknown recipe 'counting'"):
        retraining.make_recipe(RetrainSettings.model_construct(**settings))


def test_distillation_in_a_run(run):
    refused(run, "train it first with greedynas retrain .* --arch timm:", {"teacher": "mobilenetv3_small_050"})
    stage(run, {"epochs": 1}, arch="timm:mobilenetv3_small_050")
    result = stage(run, {"teacher": "mobilenetv3_small_050", "teacher_weight": 0.7})
    assert result["teacher"] == "mobilenetv3_small_050"
    plain = stage(run, name="plain")
    assert plain["path"] == result["path"]
    first, second = (load_network(run / "models" / name / "model.safetensors")[0] for name in ("macs-60K", "plain"))
    assert not same_tensors(first.state_dict(), second.state_dict())
    assert stage(run, {"teacher": "plain"}, name="grandchild")["teacher"] == "plain"
    refused(run, "cannot be its own teacher", {"teacher": "plain"}, name="plain")


def test_other_settings_are_refused_with_a_list(run):
    stage(run)
    refused(run, r"recipe\.lr is .* there, .* here.*another --name", {"lr": 0.1})
    refused(run, r"recipe\.epochs is 2 there, 4 here", {"epochs": 4})  # a cosine schedule would have been different
    refused(run, "seed is 0 there, 1 here", seed=1)
    refused(run, "inherit is False there, True here", {"inherit": True})
    refused(run, "top is 1 there, 2 here", {"top": 2})
    refused(run, "holds another network; choose another --name", arch="0101", name="macs-50K")
    stage(run, {"checkpoint_steps": 1})  # changes nothing
    assert stage(run, {"lr": 0.1}, name="other", seed=1)["model"] == "other"


def test_more_epochs_extend_a_training_where_the_recipe_allows_it(run, searched, tmp_path):
    recipe = {"recipe": "rmsprop", "warmup_epochs": 0.2, "checkpoint_steps": 4}
    stage(run, {**recipe, "epochs": 1})
    extended = stage(run, {**recipe, "epochs": 3})
    refused(run, r"recipe\.epochs is 3 there, 2 here", {**recipe, "epochs": 2})
    whole = shutil.copytree(searched, tmp_path / "whole")
    expected = stage(whole, {**recipe, "epochs": 3})
    assert {**extended, "seconds": 0} == {**expected, "seconds": 0}
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    metrics = [rows_of(folder / "models" / "macs-60K") for folder in (run, whole)]
    assert without_wall_clock(metrics[0]) == without_wall_clock(metrics[1])


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"arch": "timm:mobilnetv2_100"}, "timm has no model 'mobilnetv2_100'; did you mean 'mobilenetv2_100'"),
        ({}, {"arch": "timm:mobilenetv2_100.foo"}, r"timm has no weights 'mobilenetv2_100\.foo'"),
        ({}, {"arch": "timm:vit_tiny_patch16_224"}, "vit_tiny_patch16_224.* images of 8 px"),
        ({}, {"arch": "greedynas-a"}, "image_size 8 is too small"),
        ({}, {"arch": "greedynas-d"}, "unknown network"),
        ({}, {"arch": "0123"}, "layer 3 of tiny has no op 3"),
        ({}, {"arch": "MB6_K7 ID ID ID"}, "not in layer 0"),
        ({}, {"arch": "0101", "model": "macs-60K"}, "give only one of them"),
        ({}, {"arch": "random", "model": "macs-1K"}, "no model 'macs-1K'"),
        ({}, {"arch": "0101", "latency_table": Path("table.json")}, "--latency-table applies only to --arch random"),
        ({"top": 2}, {"arch": "random"}, "was not found by a search"),
        ({}, {"model": "macs-1K"}, "no model 'macs-1K'"),
        ({}, {"model": "../run"}, "a model's name consists of letters"),
        ({}, {"name": "a/b"}, "a model's name consists of letters"),
        ({}, {"pretrained": "cache"}, "pretrained weights exist for timm models only"),
        ({"inherit": True}, {"arch": "timm:mobilenetv3_small_050"}, "cannot inherit its weights"),
        ({"top": 2}, {"arch": "0101"}, "was not found by a search"),
        ({"teacher": "../macs-60K"}, {}, "is not trained in this run"),
        ({"randaugment": "rand-x"}, {}, "is not in timm's notation"),
    ],
)
def test_wrong_inputs_are_one_line(run, settings, options, message):
    refused(run, message, settings, **options)


def test_a_run_without_a_search(run):
    (run / "arch.json").unlink()
    refused(run, "has no chosen network yet; find one with greedynas search")
    with pytest.raises(GreedyNASError, match="is not a run directory"):
        stage(run.parent)


def test_a_known_network_of_another_space(photos, tmp_path):
    config = Config(name="tiny", space="macro", image_size=32, data={**DATA, "source": str(photos)}, train=SETTINGS)
    with Run.start(tmp_path, config):
        pass
    result = stage(tmp_path, {"epochs": 1, "batch_size": 27}, arch="greedynas-c")
    assert (result["model"], result["space"], result["image_size"]) == ("greedynas-c", "mobilenet-se", 32)
    assert result["params"] == 4_740_746 - 997 * 1281
    assert load_network(tmp_path / "models" / "greedynas-c" / "model.safetensors")[1].image_size == 32
    assert not (tmp_path / "arch.json").exists()


# Pretrained weights


@pytest.fixture(scope="module")
def weights():
    """Return weights like those of timm, for 1,000 classes and three channels."""
    torch.manual_seed(0)
    return timm.create_model("mobilenetv3_small_050").state_dict()


FROZEN = {"epochs": 1, "lr": 1e-12, "weight_decay": 0, "dropout": 0}


def fine_tuned(run, source, **options):
    name = "timm:mobilenetv3_small_050"
    result = stage(run, FROZEN, arch=name, pretrained=source, **options)
    return result, load_network(run / "models" / result["model"] / "model.safetensors")[0]


def starts_from(network, weights):
    kept = {name: p for name, p in network.named_parameters() if not name.startswith("classifier")}
    return all(torch.allclose(p, weights[name], rtol=0, atol=1e-9) for name, p in kept.items())


def test_pretrained_weights_from_files(run, weights, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    result, network = fine_tuned(run, tmp_path / "w.safetensors")
    assert (result["model"], result["pretrained"]) == (
        "timm-mobilenetv3_small_050-pretrained",
        str(tmp_path / "w.safetensors"),
    )
    assert starts_from(network, weights)
    assert network.classifier.weight.shape[0] == 3  # with its own weights
    torch.save({"state_dict": weights}, tmp_path / "w.pth")
    result, network = fine_tuned(run, tmp_path / "w.pth", name="torch")
    assert starts_from(network, weights)


def test_pretrained_weights_from_the_cache(run, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it looked at the network"))
    refused(run, "not in this machine's cache, and greedynas fetches nothing", FROZEN, arch="timm:mobilenetv3_small_050", pretrained="cache")  # fmt: skip
    folder = tmp_path / "models--timm--mobilenetv3_small_050.lamb_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_file(weights, folder / "snapshots" / "abc" / "model.safetensors")
    result, network = fine_tuned(run, "cache")
    assert result["pretrained"] == "cache"
    assert starts_from(network, weights)


class Attack:
    def __reduce__(self):
        return (Path.write_text, (Path("hacked"), "!"))


def test_files_without_weights_are_refused(run, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attack.pth").write_bytes(pickle.dumps({"state_dict": Attack()}))
    torch.save({"state_dict": Attack()}, tmp_path / "attack2.pth")
    (tmp_path / "photo.safetensors").write_bytes(b"\x89PNG" * 20)
    save_file({"conv.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    options = {"arch": "timm:mobilenetv3_small_050"}
    for name in ("attack.pth", "attack2.pth", "photo.safetensors"):
        refused(run, "is not a file of weights that can be read safely", pretrained=tmp_path / name, **options)
    refused(
        run, "are not those of timm's mobilenetv3_small_050: they differ at", pretrained="other.safetensors", **options
    )
    refused(run, "no such file of weights", pretrained="missing.pth", **options)
    assert not (tmp_path / "hacked").exists()


# Kills


def test_death_at_every_write_flush_and_rename(searched, tmp_path):
    command = [sys.executable, "-m", "tests.helpers.kill_retraining", searched, tmp_path]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["failures"] == []
    assert found["deaths"] == found["moments"] > 30
    assert {"replace", "write", "truncate", "mkdir"} < set(found["calls"])
    assert found["calls"].count("replace") == 8  # five in models/NAME, a checkpoint among them twice; two at the top
