import re

import pytest
import yaml

from greedynas import GreedyNASError, load_space
from greedynas.experimental.additive import Blended
from greedynas.experimental.split_after_identity import SplitSupernet
from greedynas.greedy.schedule import Schedule, corrected_images
from greedynas.jobs.resolving import load_config
from greedynas.settings import loading
from greedynas.settings.experiments import Hooks, hooks_of
from greedynas.settings.loading import all_keys, parse_assignments, preset_names, resolve_key
from greedynas.settings.schema import Config


def test_presets_load_and_round_trip():
    rivals = ["cifar10-fair", "cifar10-tuned", "cifar10-uniform"]
    assert preset_names() == ["auto", "cifar10", *rivals, "fashion", "imagenet", "imagenet-se"]
    files = [name for name in preset_names() if name != "auto"]  # `auto` needs data, see test_auto.py
    spaces = {name: load_config(name).space.name for name in files}
    assert spaces == {
        "cifar10": "macro",
        **dict.fromkeys(rivals, "macro"),
        "fashion": "fashion",
        "imagenet": "mobilenet",
        "imagenet-se": "mobilenet-se",
    }
    assert load_config("fashion").data.source == "fashion"
    for name in files:
        found = load_config(name)
        assert found.name == name
        assert found.space == load_space(found.space.name)
        assert Config.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize("name", ["imagenet", "imagenet-se"])
def test_the_imagenet_presets_have_the_papers_hyperparameters(name):
    found = load_config(name)
    settings = found.train
    assert (settings.sampler, settings.m, settings.k) == ("greedy", 10, 5)
    assert (settings.pool_size, settings.filter_images) == (1000, 1000)
    assert (settings.epsilon, settings.alpha) == (0.8, 0.08)
    assert (settings.lr, settings.momentum, settings.batch_size) == (0.12, 0.9, 1024)
    assert (settings.warmup, settings.max_epochs) == (10_000, 60)
    assert isinstance(settings.warmup, int)  # steps, not a share
    assert (settings.filtering, settings.pool_sampling, settings.stopping) == (True, True, True)
    assert found.data.val_images == 50 * 1000  # 50 images a class
    schedule = Schedule(settings, found.expect.train_images)
    assert schedule.epsilon(schedule.steps - 1) == pytest.approx(0.8)
    assert f"{corrected_images(*schedule.predicted_images(found.expect.epochs)) / 1e6:.1f}M" == "83.8M"


def test_settings_load_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("space: macro\nimage_size: 16\ntrain: {lr: 0.5}\n")
    found = load_config(file, {"train.m": 7})
    assert (found.name, found.space.image_size, found.train.lr, found.train.m) == ("mine", 16, 0.5, 7)
    assert found.train.k == 5
    file.write_text(yaml.safe_dump({"space": load_space("fashion").model_dump(mode="json")}))
    assert load_config(str(file)).space == load_space("fashion")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("space: macro\ntrain: 7\n", "train"),
        ("train: {lr: 0.1}\n", "space: Field required"),
        ("space: macro\ntrain: {pool: 7}\n", "unknown setting 'train.pool'; did you mean 'train.pool_size'?"),
        ("space: macro\nseeds: 7\n", "unknown setting 'seeds'; did you mean 'seed'?"),
        ("space: {name: x, opps: [ID]}\n", "space"),
        ("space: nosuch\n", "unknown space 'nosuch'"),
        ("space: macro\nimage_size: 7\n", "image_size 7 is too small"),
        ("space: macro\nsamplers: {uniform: {lr: 0.1}}\n", "unknown setting 'samplers'"),  # of version 0.1
        ("space: macro\ntrain: {ema: 0.9}\n", "unknown setting 'train.ema'"),
        ("space: macro\ntrain: {supernets: 2}\n", "unknown setting 'train.supernets'"),
        ("space: macro\nrivals: [uniform]\n", "rivals"),
        ("space: macro\nexperimental: [snapshots]\n", "experimental"),
        ("space: macro\nexperimental: {snapshot: 3}\n", "unknown experiment 'snapshot' (did you mean 'snapshots'?)"),
        ("- a list\n", "mapping"),
        ("space: [", "not valid YAML"),
        ("!!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_invalid_files_give_an_error_of_one_line(tmp_path, text, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(GreedyNASError, match=re.escape(message)) as error:
        load_config(file)
    assert "\n" not in str(error.value)
    assert "wrong.yaml" in str(error.value) or "unknown space" in str(error.value)


def test_another_sampler_changes_no_other_setting():
    for preset in ("cifar10", "cifar10-tuned", "imagenet"):
        plain = load_config(preset)
        for sampler in ("uniform", "fair"):
            found = load_config(preset, {"sampler": sampler})
            assert found.train.sampler == sampler
            assert found.model_copy(update={"train": plain.train}) == plain
            assert found.train.model_copy(update={"sampler": plain.train.sampler}) == plain.train


def test_the_plain_preset_is_the_papers_method():
    found, paper = load_config("cifar10"), load_config("imagenet")
    assert (found.experimental, found.rivals, found.study_epochs) == ({}, {}, None)
    names = ("sampler", "m", "k", "epsilon", "alpha", "filtering", "pool_sampling", "stopping", "max_epochs", "momentum",
             "weight_decay", "decay_all", "zero_residuals", "lr_end", "lr_warmup", "label_smoothing", "bn")  # fmt: skip
    for name in names:
        assert getattr(found.train, name) == getattr(paper.train, name), name
    assert found.train.lr / found.train.batch_size == paper.train.lr / paper.train.batch_size


def test_experiments_are_set_by_name():
    found = load_config("cifar10", parse_assignments(["snapshots=3", "experimental.additive=0.5"]))
    assert found.experimental == {"snapshots": 3, "additive": 0.5}
    tuned = load_config("cifar10-tuned", {"experimental.snapshots": 1})
    assert tuned.experimental == {"snapshots": 1, "additive": 0.5}
    hooks = hooks_of(load_config("cifar10-uniform").experimental)
    assert hooks.supernet is SplitSupernet
    assert hooks.score == Blended(0.5)
    nothing = {"snapshots": 1, "additive": 0, "split_after_identity": False}
    assert hooks_of(nothing) == hooks_of({}) == Hooks()


def test_a_setting_in_an_empty_section_is_refused(tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("space: macro\ntrain:\n")
    with pytest.raises(GreedyNASError, match=r"train in .* is not a section"):
        load_config(file, {"lr": 1})


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(
        GreedyNASError, match=r"unknown preset 'imagnet' \(did you mean 'imagenet'\?\); known: auto, cifar10"
    ):
        load_config("imagnet")
    with pytest.raises(GreedyNASError, match=r"unknown preset 'nosuch\.yaml'"):
        load_config("nosuch.yaml")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("lr=0.5", ("train.lr", 0.5)),
        ("lr=1e-3", ("train.lr", 1e-3)),
        ("train.lr=0.5", ("train.lr", 0.5)),
        ("flip=false", ("data.flip", False)),
        ("data.flip=no", ("data.flip", False)),
        ("seed=7", ("seed", 7)),
        ("warmup=0.5", ("train.warmup", 0.5)),
        ("warmup=5", ("train.warmup", 5)),
        ("val_images=30", ("data.val_images", 30)),
        ("clip_grad=null", ("train.clip_grad", None)),
        ("source=a=b", ("data.source", "a=b")),
        (" m = 20 ", ("train.m", 20)),
    ],
)
def test_settings_are_changed_by_bare_and_dotted_keys(assignment, expected):
    found = load_config("imagenet", parse_assignments([assignment]))
    key, value = expected
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_the_space_and_the_image_size_can_be_set():
    found = load_config("imagenet", parse_assignments(["space=macro", "image_size=16"]))
    assert (found.space.name, found.space.image_size) == ("macro", 16)


def test_every_setting_can_be_named(monkeypatch):
    keys = all_keys()
    assert len(set(keys)) == len(keys) > 40
    for key in keys:
        assert resolve_key(key, "train") == key.split(".")
        bare = key.rpartition(".")[2]
        # A bare key never means the fine-tuning of a base, which has the keys of `retrain`.
        assert resolve_key(bare, "train") in ([bare], ["train", bare], key.replace("adapt.", "retrain.").split("."))
    # The stage's own section has priority; a key of two other sections is ambiguous.
    monkeypatch.setattr(loading, "all_keys", lambda: [*keys, "retrain.lr", "retrain.batch_size"])
    assert resolve_key("lr", "train") == ["train", "lr"]
    assert resolve_key("lr", "retrain") == ["retrain", "lr"]
    with pytest.raises(GreedyNASError, match=r"setting 'lr' is ambiguous: train\.lr or retrain\.lr"):
        resolve_key("lr", "search")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.pool_sizes", "train.pool_size"),
        ("poolsize", "train.pool_size"),
        ("batchsize", "train.batch_size"),
        ("data.flips", "data.flip"),
        ("flips", "data.flip"),
        ("trian.lr", "train.lr"),
        ("sed", "seed"),
    ],
)
def test_an_unknown_setting_names_the_nearest(key, nearest):
    with pytest.raises(GreedyNASError, match=f"unknown setting '{key}'; did you mean '{nearest}'?"):
        load_config("imagenet", {key: 1})


def test_an_unknown_setting_without_a_similar_one_lists_all():
    with pytest.raises(GreedyNASError, match=r"unknown setting 'xyzzy'; settings: name, space, .*train\.lr"):
        load_config("imagenet", {"xyzzy": 1})


@pytest.mark.parametrize("assignment", ["lr", "=3", "", "lr=[", "lr={", " =1"])
def test_invalid_assignments_are_refused(assignment):
    with pytest.raises(GreedyNASError, match="--set") as error:
        parse_assignments([assignment])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["k=11"], "train.k = 11 must be at most train.m = 10"),
        (["m=3"], "train.k = 5 must be at most train.m = 3"),
        (["lr_end=2"], "train.lr_end: Input should be less than or equal to 1, got 2"),
        (["pool_size=4"], "train.pool_size = 4 is smaller than the train.k = 5 paths of one filtering"),
        (["k=0"], "train.k"),
        (["epsilon=1.01"], "train.epsilon: Input should be less than or equal to 1, got 1.01"),
        (["epsilon=-0.1"], "train.epsilon: Input should be greater than or equal to 0"),
        (["alpha=2"], "train.alpha"),
        (["lr=-0.1"], "train.lr: Input should be greater than 0, got -0.1"),
        (["lr=0"], "train.lr"),
        (["lr=.nan"], "train.lr"),
        (["lr=fast"], "train.lr"),
        (["lr=[1, 2]"], "train.lr"),
        (["momentum=1"], "train.momentum"),
        (["weight_decay=-1"], "train.weight_decay"),
        (["label_smoothing=1"], "train.label_smoothing"),
        (["clip_grad=0"], "train.clip_grad"),
        (["batch_size=0"], "train.batch_size"),
        (["batch_size=2.5"], "train.batch_size"),
        (["max_epochs=0"], "train.max_epochs"),
        (["warmup=-1"], "train.warmup"),
        (["warmup=1.5"], "train.warmup = 1.5 as a share must be at most 1"),
        (["filter_images=0"], "train.filter_images"),
        (["bn=none"], "unknown BatchNorm mode 'none'; known: batch, recalibrate, running"),
        (["search.bn=none"], "unknown BatchNorm mode 'none'; known: batch, recalibrate, running"),
        (["bn=[batch]"], "train.bn"),
        (["sampler=best"], "unknown sampler 'best' (did you mean 'fbnet'?); known: greedy, uniform, fair, darts"),
        (["sampler=7"], "train.sampler"),
        (["train.ema=0.9"], "unknown setting 'train.ema'"),
        (["snapshots=0"], "experimental.snapshots must be a number of supernets from 1 to 1000, got 0"),
        (["snapshots=1001"], "experimental.snapshots"),
        (["snapshots=2.0"], "experimental.snapshots"),
        (["snapshots=true"], "experimental.snapshots"),
        (["snapshots=[3]"], "experimental.snapshots"),
        (["additive=1.1"], "experimental.additive must be a share between 0 and 1, got 1.1"),
        (["additive=-0.1"], "experimental.additive"),
        (["additive=.nan"], "experimental.additive"),
        (["additive=true"], "experimental.additive"),
        (["additive=half"], "experimental.additive"),
        (["split_after_identity=1"], "experimental.split_after_identity must be true or false, got 1"),
        (
            ["experimental.beauty=1"],
            "unknown experiment 'beauty'; known: additive, second_opinion, shifting, snapshots, split_after_identity",
        ),
        (["evaluator=oracle"], "unknown evaluator 'oracle'; known: supernet"),
        (["experimental=7"], "experimental"),
        (["checkpoint_minutes=0"], "train.checkpoint_minutes"),
        (["seed=-1"], "seed"),
        (["precision=fp8"], "precision"),
        (["device=gpu"], "device"),
        (["device=cpus"], "device"),
        (["image_size=1"], "image_size 1 is too small"),
        (["val_images=0"], "data.val_images"),
        (["val_images=1.5"], "data.val_images"),
        (["augment=all"], "data.augment"),
        (["memory_gb=-1"], "data.memory_gb"),
        (["space=7"], "space"),
        (["train=7"], "unknown setting 'train'"),
    ],
)
def test_invalid_values_give_an_error_of_one_line(assignments, message):
    with pytest.raises(GreedyNASError) as error:
        load_config("imagenet", parse_assignments(assignments))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
