import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from greedynas import load_space
from greedynas.jobs.resolving import load_config
from greedynas.stages.run import Run
from tests.helpers.figures import FIGURES
from tests.helpers.paths import ROOT
from tests.helpers.pictures import paint, spoil
from tests.helpers.run_directories import content
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", list(FIGURES))
def test_describe_known_networks_as_json(run_cli, name):
    code, out, _ = run_cli("describe", "--path", name, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["params"], facts["macs"]) == FIGURES[name]
    assert facts["name"] == name
    assert facts["space"] == ("mobilenet" if name == "proxyless-r" else "mobilenet-se")
    assert [load_space(facts["space"]).ops[op] for op in facts["path"]] == facts["ops"]
    for cost in ("macs", "params"):
        assert sum(layer[cost] for layer in facts["layers"]) == facts[cost]


def test_describe_a_path_at_another_size_and_class_count(run_cli):
    _, out, _ = run_cli("describe", "--space", "macro", "--path", "22212202", "--json")
    assert json.loads(out)["params"] == 1_985_514
    assert json.loads(out)["macs"] == 85_164_544
    _, out, _ = run_cli(
        "describe", "--space", "macro", "--path", "22212202", "--classes", 100, "--image-size", 64, "--json"
    )
    facts = json.loads(out)
    assert facts["params"] == 1_985_514 + 90 * 1281
    assert facts["macs"] == 4 * (85_164_544 - 12_800) + 128_000
    assert facts["canonical_path"] == [2, 2, 2, 1, 2, 2, 2, 0]


def test_describe_a_space(run_cli):
    _, out, _ = run_cli("describe", "--space", "mobilenet", "--json")
    facts = json.loads(out)
    assert facts["paths"] == 7**21
    assert facts["supernet_params"] == 16_252_744
    assert facts["macs"]["min"] == 50_878_976
    assert facts["macs"]["min"] < facts["macs"]["quantiles"]["50%"] < facts["macs"]["max"]
    assert sum(facts["macs"]["histogram"]["counts"]) == facts["sampled_paths"]
    code, out, _ = run_cli("describe", "--space", "mobilenet")
    assert code == 0
    assert "558,545,864,083,284,007 paths" in out
    assert "MB6_K7" in out


def test_describe_without_arguments_lists_spaces_and_networks(run_cli):
    _, out, _ = run_cli("describe")
    assert all(name in out for name in ("mobilenet-se", "shufflenet", *FIGURES))


def test_a_space_file_works_where_a_name_does(run_cli, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(load_space("macro").to_yaml().replace("name: macro", "name: '<b>mine</b> [red]'"))
    _, out, _ = run_cli("describe", "--space", file, "--path", "22212202", "--json")
    assert json.loads(out)["macs"] == 85_164_544
    code, out, _ = run_cli("describe", "--space", file)
    assert code == 0
    assert "<b>mine</b> [red]" in out


def test_drawing(run_cli, tmp_path):
    from xml.etree import ElementTree

    file = tmp_path / "a.svg"
    code, _, _ = run_cli("describe", "--path", "greedynas-a", "--svg", file)
    assert code == 0
    texts = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("MB3_K5_SE") == 3
    assert texts.count("ID") == 1
    fills = {box.get("fill") for box in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}rect")}
    assert len(fills) > 5  # coloured by op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "mobilenett"], "unknown space 'mobilenett' (did you mean 'mobilenet'?)"),
        (["--space", "nosuch.yaml"], "no such space file"),
        (["--space", "macro", "--path", "222"], "has 8 ops, got 3"),
        (["--space", "macro", "--path", "22222229"], "has no op 9"),
        (["--space", "macro", "--path", "ID ID ID ID ID ID ID MB3_K7"], "not in layer 7"),
        (["--space", "macro", "--path", "ID ID ID ID ID ID ID FOO"], "unknown op"),
        (["--space", "macro", "--path", "greedynas-a"], "network of mobilenet-se"),
        (["--path", "greedynas-x"], "unknown network"),
        (["--path", "2221"], "--space"),
        (["--space", "mobilenet", "--image-size", "31"], "too small"),
        (["--space", "mobilenet", "--image-size", "0"], "--image-size"),
        (["--space", "mobilenet", "--image-size", "-5"], "--image-size"),
        (["--space", "mobilenet", "--classes", "0"], "--classes"),
        (["--space", "mobilenet", "--classes", "many"], "--classes"),
        (["--space", "mobilenet", "--svg", "x.svg"], "--path"),
        (["--path", "greedynas-a", "--svg", "no/such/folder/x.svg"], "cannot write"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run_cli, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli("describe", *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_broken_space_file_is_one_line(run_cli, tmp_path):
    (tmp_path / "broken.yaml").write_text("name: x\n  ops: [")
    code, _, err = run_cli("describe", "--space", tmp_path / "broken.yaml")
    assert code == 2
    assert err.count("\n") == 1
    assert "not valid YAML" in err


# train


def test_the_plan_of_the_papers_training(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli("train", "imagenet", "--plan")
    assert (code, err) == (0, "")
    assert all(part in out for part in ("89.7M", "83.8M", "m: 10", "10,000 steps of warm-up"))
    code, out, _ = run_cli("train", "imagenet", "--plan", "--json", "--seed", 3, "--set", "lr=0.5")
    facts = json.loads(out)
    assert code == 0
    assert (facts["config"]["seed"], facts["config"]["train"]["lr"], facts["config"]["train"]["m"]) == (3, 0.5, 10)
    plan = facts["plan"]
    assert round(plan["supplement_corrected_images"] / 1e6, 1) == 89.7
    costs = plan["costs"]["stopping as in the paper"]
    assert costs["epochs"] == 46
    assert round(costs["corrected_images"] / 1e6, 1) == 83.8
    assert plan["costs"]["at most"]["epochs"] == 60
    assert (plan["steps_per_epoch"], plan["warmup_steps"]) == (1202, 10_000)
    # The plan leaves out what cannot happen.
    _, out, _ = run_cli("train", "imagenet", "--plan", "--json", "--set", "max_epochs=20")
    assert list(json.loads(out)["plan"]["costs"]) == ["at most"]
    _, out, _ = run_cli("train", "imagenet", "--plan", "--json", "--sampler", "fair")
    (costs,) = json.loads(out)["plan"]["costs"].values()
    assert (costs["optimization_images"], costs["evaluation_images"]) == (7 * 60 * 1202 * 1024, 60 * 1000)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny(tmp_path):
    """Write a config file next to a folder of photos, and return the arguments that train on them."""
    paint(tmp_path / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
    config = {"space": tiny_space().model_dump(mode="json"), "data": {"workers": 0}, "train": SETTINGS}
    config["data"] |= {"val_images": 12, "test_images": 6}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "tiny.yaml", "--data", tmp_path / "photos"


def test_the_plan_for_data_of_the_user(run_cli, tiny, tmp_path):
    code, out, _ = run_cli("train", *tiny, "--plan", "--json")
    assert code == 0
    assert json.loads(out)["plan"]["train_images"] == 42
    assert json.loads(out)["plan"]["supplement_corrected_images"] is None
    code, out, err = run_cli("train", *tiny[:2], tmp_path / "nosuch", "--plan")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_train_and_repeat_the_command(run_cli, tiny, tmp_path):
    command = ["train", *tiny, "--out", tmp_path / "run", "--seed", 5, "--set", "max_epochs=4", "--set", "flip=false"]
    code, out, err = run_cli(*command)
    assert (code, err) == (0, "")
    assert "3 classes; train 42, val 12 (held out of train), test 6" in " ".join(out.split())  # lines may be folded
    assert "Trained for 4 epochs (max_epochs reached): 160 optimization and" in out
    config = load_config(tmp_path / "tiny.yaml", {"data.source": str(tmp_path / "photos"), "seed": 5, "max_epochs": 4})
    with Run.open(tmp_path / "run") as run:
        watched = config.train.model_copy(update={"accuracy_images": 1000})
        assert run.config().train == watched
        assert run.config().seed == 5
        assert run.config().data == config.data.model_copy(update={"flip": False})
        assert run.load_checkpoint()[1]["stopped"] == "max_epochs reached"
    before = content(tmp_path / "run")
    # A finished stage is not run again.
    again, out_again, err = run_cli(*command)
    assert (again, err) == (0, "")
    assert out_again.splitlines()[-2:] == out.splitlines()[-2:]
    assert content(tmp_path / "run") == before
    code, out, _ = run_cli(*command, "--json")
    facts = json.loads(out)
    assert code == 0
    assert content(tmp_path / "run") == before
    assert facts["run"] == str(tmp_path / "run")
    assert (facts["steps"], facts["epochs"], facts["stopped"]) == (16, 4, "max_epochs reached")
    assert facts["optimization_images"] == 160
    assert facts["evaluation_images"] % 6 == 0
    assert facts["corrected_images"] == pytest.approx(160 + facts["evaluation_images"] / 3.33)
    pool = json.loads((tmp_path / "run" / "supernet" / "pool.json").read_text())
    assert (facts["pool"], facts["pool_best_loss"]) == (len(pool), pool[0]["loss"])
    assert facts["measured_ratio"] is None or facts["measured_ratio"] >= 1.5  # None if the machine was busy


def test_a_training_with_a_budget_explores_only_paths_within_it(run_cli, tiny, tmp_path):
    """The budget is between the costs of the paths, so that an unlimited pool would have paths above it."""
    space = load_config(tmp_path / "tiny.yaml").space.adapt(num_classes=3)
    low, high = space.cost_tables["macs"].range
    limit = (low + high) // 2
    code, out, _ = run_cli("train", *tiny, "--out", tmp_path / "run", "--flops", str(limit))
    assert code == 0
    pool = [entry["path"] for entry in json.loads((tmp_path / "run" / "supernet" / "pool.json").read_text())]
    assert pool
    assert max(space.costs(pool).macs) <= limit
    assert f"--flops {limit / 1000:g}K" in out  # the next command has the same limit
    code, out, err = run_cli("train", *tiny, "--out", tmp_path / "two", "--flops", "1M", "--flops", "2M")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a training has a single budget" in err
    code, _, err = run_cli("train", *tiny, "--out", tmp_path / "none", "--flops", "10")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("sampler", ["uniform", "fair"])
def test_train_with_the_rivals(run_cli, tiny, tmp_path, sampler):
    code, out, _ = run_cli("train", *tiny, "--out", tmp_path / "run", "--sampler", sampler, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["optimization_images"] == 120 * (3 if sampler == "fair" else 1)
    assert (facts["evaluation_images"], facts["pool"], facts["pool_best_loss"]) == (3 * 12, 0, None)


def one_class(photos):
    for name in ("b", "c"):
        (photos / name).rename(photos.parent / name)


def one_unreadable(photos):
    spoil(photos / "b" / "7.png")


def one_class_unreadable(photos):
    for file in (photos / "b").iterdir():
        spoil(file, "text")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda photos: photos.rename(photos.parent / "elsewhere"), [], "no such data"),
        (lambda photos: (photos / "d").mkdir(), [], "no images of class d"),
        (one_class, [], "at least two classes are needed, but the data has a"),
        (one_unreadable, ["--set", "unreadable=refuse"], "7.png"),
        (one_class_unreadable, [], "no readable image of class 'b'"),
        (None, ["--set", "val_images=55"], "data.val_images = 55 needs 55 images, but of 60 at most 51"),
        (None, ["--set", "val_images=2"], "fewer than the 3 classes"),
        (None, ["--set", "filter_images=13"], "train.filter_images = 13 but there are 12 validation images"),
        (None, ["--set", "pool_sizes=9"], "unknown setting 'pool_sizes'; did you mean 'train.pool_size'?"),
        (None, ["--set", "k=5"], "train.k = 5 must be at most train.m = 4"),
        (None, ["--set", "epsilon=1.1"], "train.epsilon"),
        (None, ["--set", "pool_size=1"], "train.pool_size = 1 is smaller than the train.k = 2"),
        (None, ["--set", "lr=-1"], "train.lr"),
        (None, ["--set", "lr"], "--set takes key=value"),
        (None, ["--set", "device=cpux"], "device"),
        (None, ["--sampler", "greedier"], "unknown sampler 'greedier' (did you mean 'greedy'?); known: greedy"),
        (None, ["--seed", "-1"], "--seed"),
        (None, ["--seed", "one"], "--seed"),
        (None, ["--set", "image_size=1"], "image_size 1 is too small"),
        (None, ["--fast"], "--fast"),
    ],
)
def test_wrong_input_to_train_leaves_nothing_behind(run_cli, tiny, tmp_path, change, arguments, message):
    if change is not None:
        change(tmp_path / "photos")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_cli("train", *tiny, "--out", tmp_path / "runs" / "new", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_fair_training_needs_equally_many_ops_in_all_layers(run_cli, tiny, tmp_path):
    config = yaml.safe_load(tiny[0].read_text())
    config["space"]["stages"][0]["ops"] = ["ID", "MB2_K3"]
    tiny[0].write_text(yaml.safe_dump(config))
    code, out, err = run_cli("train", *tiny, "--out", tmp_path / "run", "--sampler", "fair")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the fair sampler needs the same number of ops in every layer" in err
    assert not (tmp_path / "run").exists()


def test_train_names_what_is_missing(run_cli, tiny, tmp_path):
    code, _, err = run_cli("train", *tiny)
    assert (code, err.count("\n")) == (2, 1)
    assert "--out" in err
    code, _, err = run_cli("train", "imagnet", "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'imagenet'?" in err
    assert not (tmp_path / "run").exists()


def test_unreadable_images_are_named_and_skipped(run_cli, tiny, tmp_path):
    spoil(tmp_path / "photos" / "b" / "7.png")
    code, out, _ = run_cli("train", *tiny, "--out", tmp_path / "run", "--set", "max_epochs=1", "--set", "seed=1")
    assert code == 0
    assert f"skipped, unreadable: {tmp_path / 'photos' / 'b' / '7.png'}" in " ".join(out.split())
    assert "7.png" in (tmp_path / "run" / "log.txt").read_text()


def test_other_directories_are_not_changed(run_cli, tiny, tmp_path):
    run = tmp_path / "run"
    command = ["train", *tiny, "--out", run]
    assert run_cli(*command)[0] == 0
    before = content(run)
    code, out, err = run_cli(*command, "--set", "lr=0.5", "--seed", 4)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "train.lr is 0.05 there, 0.5 here" in err
    assert "seed is 0 there, 4 here" in err
    with Run.open(run):
        code, out, err = run_cli(*command)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "in use by another greedynas process" in err
    assert content(run) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("precious")
    for folder, reason in (("photos", "lies inside of --data"), ("other", "is not empty and not a greedynas run")):
        before = content(tmp_path / folder)
        code, out, err = run_cli("train", *tiny, "--out", tmp_path / folder)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert reason in err
        assert content(tmp_path / folder) == before
    code, out, err = run_cli("train", *tiny, "--out", tiny[0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot write to" in err


def test_divergence_is_one_line_with_step_and_path(run_cli, tiny, tmp_path):
    command = ["train", *tiny, "--out", tmp_path / "run", "--set", "lr=1.0e+30", "--set", "checkpoint_steps=1"]
    for _ in range(2):  # the checkpoint before the divergence is good, so it is repeated
        code, _, err = run_cli(*command, "--sampler", "uniform")
        assert (code, err.count("\n")) == (2, 1)
        assert "training diverged: the loss is not a number at step 2 on path" in err
        with Run.open(tmp_path / "run") as run:
            tensors, state = run.load_checkpoint()
        assert state["step"] == 1
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_damaged_checkpoint_is_reported(run_cli, tiny, tmp_path):
    command = ["train", *tiny, "--out", tmp_path / "run", "--set", "checkpoint_steps=5"]
    _, out, _ = run_cli(*command)
    with Run.open(tmp_path / "run") as run:
        newest = run.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    code, again, err = run_cli(*command)
    assert code == 0
    assert err.count("\n") == 1
    assert err.startswith(f"warning: checkpoint {newest.name} is damaged")
    assert again.splitlines()[-1] == out.splitlines()[-1]


def test_the_wheel_works_elsewhere(tmp_path):
    run = {"check": True, "capture_output": True, "text": True}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT], **run)
    (wheel,) = tmp_path.glob("greedynas-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        f"greedynas/spaces/library/{name}.yaml"
        for name in ("fashion", "macro", "mobilenet", "mobilenet-se", "shufflenet")
    } <= set(names)
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], **run)
    code = "import greedynas, sys; print(greedynas.__file__); sys.argv = ['greedynas', 'describe', '--path', 'greedynas-a', '--json']; "
    code += "from greedynas.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, **run
    )
    where, _, facts = result.stdout.partition("\n")
    assert Path(where).is_relative_to(tmp_path / "site")
    assert json.loads(facts)["params"] == 6_503_082


def test_describe_does_not_wait_for_torch():
    code = "import sys, greedynas.cli.main, greedynas.spaces.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_loss_of_a_process_that_reads_images_is_one_line(run_cli, photos, tmp_path, monkeypatch):
    """Check a process that the system kills after a while without a message, as it does if memory is short."""
    import gc
    import os
    import signal

    from greedynas.data import loader

    parent, read, count = os.getpid(), loader._read, []

    def killed(*arguments):
        count.append(1)
        if os.getpid() != parent and len(count) > 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(*arguments)

    monkeypatch.setattr(loader, "_read", killed)
    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "data": {"source": str(photos), "test_images": 6, "val_images": 12, "workers": 1, "memory_gb": 0},
        "train": {**SETTINGS, "max_epochs": 20, "checkpoint_steps": 2},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    code, _, err = run_cli("train", tmp_path / "tiny.yaml", "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: a process that reads images has ended (DataLoader worker")
    assert "the same command resumes from there" in err
    gc.collect()  # the loader of the dead process; its signal handler would raise an error in another test
