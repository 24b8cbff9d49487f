import json
import logging
import os
import pickle
import re
import signal
import time

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from greedynas import GreedyNASError, load_space
from greedynas.data.settings import DataSettings
from greedynas.greedy.settings import TrainSettings
from greedynas.jobs.resolving import load_config
from greedynas.runtime.cpu.allocator import keep_freed_memory
from greedynas.settings.experiments import EXPERIMENTS
from greedynas.settings.loading import all_keys, preset_names
from greedynas.settings.schema import Config
from greedynas.stages.run import FREE, Run, read_config
from tests.helpers.run_directories import content
from tests.helpers.training import new_net, new_run, rows_of, same_tensors, train, without_wall_clock

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Config(name="mine", space="macro")


def changed(**changes):
    return Config.model_validate({**CONFIG.model_dump(), **changes})


# The configuration


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "auto"])  # auto needs data
def test_the_configuration_is_complete_and_is_read_back(tmp_path, name):
    config = load_config(name, {"image_size": 64, "val_images": 0.25, "warmup": 0.5, "clip_grad": 1, "seed": 2**62})
    with Run.start(tmp_path / "new" / "run", config) as run:
        assert run.config() == config
    file = tmp_path / "new" / "run" / "config.yaml"
    assert read_config(file.parent) == config
    written = yaml.safe_load(file.read_text())
    experiments = {f"experimental.{name}" for name in EXPERIMENTS.names()}
    assert written["experimental"] == config.experimental
    for key in set(all_keys()) - experiments:
        place = written
        for part in key.split("."):
            place = place[part]
    assert written["schema_version"] == 2
    assert written["space"]["stages"] == [stage.model_dump(mode="json") for stage in config.space.stages]
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert written["versions"]["threads"] == torch.get_num_threads()
    assert {"timm", "triton", "greedynas", "python", "numpy", "torchvision", "cuda"} <= written["versions"].keys()


def test_other_settings_are_refused_with_a_list_and_nothing_is_overwritten(tmp_path):
    with Run.start(tmp_path, CONFIG) as run:
        run.save_checkpoint(3, {"x": torch.zeros(2)}, {"step": 3})
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    before = content(tmp_path)
    other = changed(seed=7, train=TrainSettings(lr=0.5, m=20), data=DataSettings(flip=False))
    handlers = list(logging.getLogger("greedynas").handlers)
    with pytest.raises(GreedyNASError) as error:
        Run.start(tmp_path, other)
    for message in ("seed is 0 there, 7 here", "train.lr is 0.12 there, 0.5 here", "train.m is 10 there, 20 here"):
        assert message in str(error.value)
    assert "data.flip is True there, False here" in str(error.value)
    assert "train.k" not in str(error.value)
    assert "\n" not in str(error.value)
    assert content(tmp_path) == before
    assert logging.getLogger("greedynas").handlers == handlers
    with pytest.raises(GreedyNASError, match=r"space\.name is 'macro' there, 'fashion' here"):
        Run.start(tmp_path, changed(space=load_space("fashion")))
    with Run.start(tmp_path, CONFIG):  # a refused start holds no lock, and the same settings resume the run
        pass


def test_settings_that_do_not_affect_results_may_change(tmp_path):
    with Run.start(tmp_path, CONFIG):
        pass
    train = TrainSettings(checkpoint_minutes=1, checkpoint_steps=7)
    other = changed(device="cpu", data=DataSettings(workers=3), train=train)
    with Run.start(tmp_path, other) as run:
        assert run.config() == other
    assert set(all_keys()) >= FREE


@pytest.mark.parametrize(
    ("schema", "versions", "message"),
    [
        ("1", "{greedynas: 0.1.0}", "was made by greedynas 0.1.0,"),
        ("99", "{greedynas: 7.5.0}", "was made by greedynas 7.5.0,"),
        ("1", "{}", "was made by greedynas of another version,"),
        ("2.5", "[0.1.0]", "was made by greedynas of another version,"),
        ("null", "null", "was made by greedynas of another version,"),
    ],
)
def test_a_run_of_another_schema_is_refused_with_the_version_that_can_read_it(tmp_path, schema, versions, message):
    with Run.start(tmp_path, CONFIG):
        pass
    file = tmp_path / "config.yaml"
    data = yaml.safe_load(file.read_text())
    assert data["schema_version"] == 2
    file.write_text(
        yaml.safe_dump(data | {"schema_version": yaml.safe_load(schema), "versions": yaml.safe_load(versions)})
    )
    before = content(tmp_path)
    for open_run in (lambda: Run.start(tmp_path, CONFIG), lambda: Run.open(tmp_path), lambda: read_config(tmp_path)):
        with pytest.raises(GreedyNASError, match=re.escape(message)) as error:
            open_run()
        assert str(error.value).startswith(f"{tmp_path} was made by")
        assert "use that version, or start a new run in another --out" in str(error.value)
        assert "\n" not in str(error.value)
        assert content(tmp_path) == before


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"precious")
    with pytest.raises(GreedyNASError, match="is not empty and not a greedynas run"):
        Run.start(tmp_path, CONFIG)
    assert [file.name for file in tmp_path.iterdir()] == ["photo.png"]
    with pytest.raises(GreedyNASError, match=r"cannot write to .*photo\.png"):
        Run.start(tmp_path / "photo.png", CONFIG)
    with pytest.raises(GreedyNASError, match=r"cannot write to .*photo\.png/run"):
        Run.start(tmp_path / "photo.png" / "run", CONFIG)
    with pytest.raises(GreedyNASError, match="is not a run directory"):
        Run.open(tmp_path)
    assert (tmp_path / "photo.png").read_bytes() == b"precious"


def test_files_of_a_crash_at_the_start_are_no_obstacle(tmp_path):
    for name in (".lock", "log.txt", "config.yaml.tmp"):
        (tmp_path / name).write_text("half")
    with Run.start(tmp_path, CONFIG) as run:
        assert run.config() == CONFIG
    assert not (tmp_path / "config.yaml.tmp").exists()
    assert (tmp_path / "log.txt").read_text().startswith("half")


def test_the_log_is_kept(tmp_path):
    for i in range(2):
        with Run.start(tmp_path, CONFIG):
            logging.getLogger("greedynas").info("hello %d", i)
    logging.getLogger("greedynas").info("after the run")
    log = (tmp_path / "log.txt").read_text()
    assert re.findall("hello .", log) == ["hello 0", "hello 1"]
    assert "after" not in log


# The lock


def holder(folder):
    """Start another process that has the run open and a worker process of its own, and return their ids."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run = Run.start(folder, CONFIG)
            worker = os.fork()
            if worker != 0:
                os.write(writing, b"%d" % worker)
            time.sleep(20)
            run.close()
        finally:
            os._exit(1)
    os.close(writing)
    worker = int(os.read(reading, 20))
    os.close(reading)
    return child, worker


def test_a_run_is_for_one_process_at_a_time(tmp_path):
    child, worker = holder(tmp_path)
    try:
        with pytest.raises(GreedyNASError, match="is in use by another greedynas process"):
            Run.start(tmp_path, CONFIG)
        with pytest.raises(GreedyNASError, match="is in use by another greedynas process"):
            Run.open(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(worker, 0)  # it outlives its parent for a while,
        with Run.start(tmp_path, CONFIG):  # and the lock does not
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


# Checkpoints


def fill(run, *steps):
    for step in steps:
        tensors = {"a": torch.full((3, 4), float(step)), "b": torch.arange(5), "momentum.a": torch.ones(2, 2, 2).mT}
        run.save_checkpoint(step, tensors, {"step": step, "loss": 0.1 * step, "pool": [1, [2]], "why": None})


def steps_of(run):
    return [int(file.name.split("-")[1]) for file in run.checkpoints()]


def test_the_last_two_checkpoints_are_kept_and_are_read_back(tmp_path):
    with Run.start(tmp_path, CONFIG) as run:
        assert run.load_checkpoint() is None
        assert run.checkpoints() == []
        for step, kept in ((5, [5]), (10, [10, 5]), (100, [100, 10]), (1000, [1000, 100])):
            fill(run, step)
            assert steps_of(run) == kept
        assert sorted(file.name for file in run.supernet.iterdir()) == sorted(file.name for file in run.checkpoints())
        tensors, state = run.load_checkpoint()
        assert state == {"step": 1000, "loss": 100.0, "pool": [1, [2]], "why": None}
        assert tensors["a"].tolist() == [[1000.0] * 4] * 3
        assert tensors["b"].dtype == torch.int64
        assert tensors["momentum.a"].shape == (2, 2, 2)


def test_a_second_checkpoint_of_the_same_step_replaces_the_first(tmp_path):
    """Check that the checkpoint of the finished training counts as newer than that of the last step."""
    for i in range(20):  # names end with a digest, so the order of names would be right only half of the time
        with Run.start(tmp_path / str(i), CONFIG) as run:
            fill(run, 5, 10)
            run.save_checkpoint(10, {"a": torch.ones(2)}, {"step": 10, "stopped": f"done {i}"})
            assert steps_of(run) == [10, 5]
            assert run.load_checkpoint()[1]["stopped"] == f"done {i}"


def test_a_finished_run_is_unchanged(data, tmp_path):
    settings = {"checkpoint_steps": 4, "max_epochs": 2}
    keep_freed_memory()  # a run notes how its process allocates memory, which the first training would change
    with new_run(tmp_path, **settings) as run:
        _, first = train(data, run=run, **settings)
    before = content(tmp_path)
    with new_run(tmp_path, **settings) as run:
        net, again = train(data, run=run, **settings)
        assert same_tensors({f"net.{k}": v for k, v in net.state_dict().items()}, weights(run.load_checkpoint()[0]))
    assert content(tmp_path) == before
    assert again.to_json() == first.to_json()


def weights(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.startswith("net.")}


def test_nothing_in_a_run_is_executed_when_it_is_loaded(data, tmp_path, monkeypatch):
    with new_run(tmp_path, checkpoint_steps=3) as run:
        train(data, run=run, checkpoint_steps=3)
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"}
    assert suffixes == {".yaml", ".txt", ".jsonl", ".json", ".safetensors"}

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    with Run.open(tmp_path) as run:
        tensors, state = run.load_checkpoint()
        newest = run.checkpoints()[0]
    with safe_open(newest, framework="pt") as file:  # by safetensors alone, as other programs would read it
        assert json.loads(file.metadata()["state"]) == state
        names = set(file.keys())
    net = new_net()
    assert names == tensors.keys()
    assert {name for name in names if name.startswith("net.")} == {f"net.{name}" for name in net.state_dict()}
    trained = {name.removeprefix("momentum.") for name in names if name.startswith("momentum.")}
    assert trained <= {name for name, _ in net.named_parameters()}
    assert "classifier.weight" in trained
    assert (state["step"], state["epoch"], state["stopped"]) == (12, 3, "max_epochs reached")


# Damage


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Make a run with the checkpoints of steps 1 and 2."""
    with Run.start(tmp_path_factory.mktemp("damage"), CONFIG) as run:
        fill(run, 1, 2)
        yield run


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_bit_anywhere_is_noticed(two_checkpoints, data):
    newest, _ = two_checkpoints.checkpoints()
    whole = newest.read_bytes()
    spoiled = bytearray(whole)
    spoiled[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        newest.write_bytes(spoiled)
        assert two_checkpoints.load_checkpoint()[1]["step"] == 1
    finally:
        newest.write_bytes(whole)
    assert two_checkpoints.load_checkpoint()[1]["step"] == 2


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b[: len(b) // 2], lambda b: b[:7], lambda b: b"",
                                   lambda b: b + b"\0", lambda b: b"\0" * len(b)])  # fmt: skip
def test_a_damaged_checkpoint_falls_back_to_the_earlier_one_with_a_warning(two_checkpoints, spoil, caplog):
    newest, other = two_checkpoints.checkpoints()
    whole, older = newest.read_bytes(), other.read_bytes()
    try:
        newest.write_bytes(spoil(whole))
        with caplog.at_level(logging.WARNING, "greedynas"):
            assert two_checkpoints.load_checkpoint()[1]["step"] == 1
        (record,) = caplog.records
        assert f"checkpoint {newest.name} is damaged" in record.getMessage()
        assert "going back to the previous one" in record.getMessage()
        other.write_bytes(spoil(older))
        with caplog.at_level(logging.WARNING, "greedynas"):
            assert two_checkpoints.load_checkpoint() is None
        assert "no checkpoint is intact; starting from the beginning" in caplog.text
        assert "no checkpoint is intact" in (two_checkpoints.folder / "log.txt").read_text()
    finally:
        newest.write_bytes(whole)
        other.write_bytes(older)


def test_a_renamed_checkpoint_is_not_trusted(two_checkpoints, caplog):
    newest, other = two_checkpoints.checkpoints()
    imposter = newest.with_name(newest.name.replace("step-000000002", "step-000000003"))
    imposter.write_bytes(other.read_bytes())
    try:
        assert two_checkpoints.load_checkpoint()[1]["step"] == 2
        assert imposter.name in caplog.text
    finally:
        imposter.unlink()


@pytest.mark.parametrize("next_step", [8, 10, 12])
def test_damaged_checkpoints_do_not_displace_whole_ones(tmp_path, next_step):
    with Run.start(tmp_path, CONFIG) as run:
        fill(run, 5, 10)
        run.checkpoints()[0].write_bytes(b"")
    with Run.start(tmp_path, CONFIG) as run:
        assert run.load_checkpoint()[1]["step"] == 5
        fill(run, next_step)
        assert steps_of(run) == [next_step, 5]
        run.checkpoints()[0].write_bytes(b"")
        assert run.load_checkpoint()[1]["step"] == 5


def test_stray_temporary_files_are_ignored_and_cleaned(tmp_path):
    with Run.start(tmp_path, CONFIG) as run:
        fill(run, 1)
        (name,) = [file.name for file in run.checkpoints()]
        for stray in (f"{name.replace('001', '002')}.tmp", "pool.json.tmp"):
            (run.supernet / stray).write_bytes(b"half of")
        (run.supernet / "step-9-notes.safetensors").write_bytes(b"not ours")
        assert run.load_checkpoint()[1]["step"] == 1
        fill(run, 2)
        assert not list(run.supernet.glob("*.tmp"))
        assert (run.supernet / "step-9-notes.safetensors").read_bytes() == b"not ours"


@pytest.mark.parametrize("damaged", [1, 2])
def test_training_resumes_exactly_after_damage(data, tmp_path, damaged, caplog):
    settings = {"checkpoint_steps": 5, "max_epochs": 3}
    results = []
    for folder, damage in ((tmp_path / "whole", 0), (tmp_path / "damaged", damaged)):
        with new_run(folder, **settings) as run:
            train(data, run=run, **settings)
            assert steps_of(run) == [12, 10]
            for file in run.checkpoints()[:damage]:
                file.write_bytes(file.read_bytes()[:-5])
        with new_run(folder, **settings) as run:
            net, state = train(data, run=run, **settings)
            assert steps_of(run) == [12, 10]
        metrics = [without_wall_clock(rows) for rows in rows_of(folder).values()]
        results.append((net.state_dict(), state.pool.state(), metrics))
    assert same_tensors(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert caplog.text.count("is damaged") == damaged
    assert ("from the beginning" in caplog.text) == (damaged == 2)
