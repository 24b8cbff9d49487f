"""Checkpoints that are written during training, signals that end a training, and out-of-memory errors."""

import errno
import json
import os
import signal
import threading
import time

import pytest
import torch

from greedynas import GreedyNASError
from greedynas.deploy.onnx_files import export_onnx
from greedynas.greedy.recorder import Recorder
from greedynas.rundir import checkpointing, checkpoints
from greedynas.rundir.checkpoints import Checkpoints, copied
from greedynas.runtime import signals
from greedynas.runtime.memory import is_out_of_memory, largest_that_fits, suggesting_what_fits
from tests.helpers.training import new_run, same_tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def slow_writes(monkeypatch):
    """Make every write wait for an event, and record the threads that write."""
    gate, threads = threading.Event(), []
    save = Checkpoints.save

    def slow(self, *arguments):
        threads.append(threading.current_thread())
        assert gate.wait(20)
        save(self, *arguments)

    monkeypatch.setattr(Checkpoints, "save", slow)
    return gate, threads


def test_training_does_not_wait_for_the_disk(data, tmp_path, slow_writes, monkeypatch):
    gate, threads = slow_writes
    steps = []
    due = checkpointing.Checkpointing.if_due

    def watched(self, path=None):
        due(self, path)
        steps.append(self.journal.state.step)
        if len(steps) == 7:  # three steps after the first checkpoint was started
            assert len(threads) == 1
            gate.set()

    monkeypatch.setattr(checkpointing.Checkpointing, "if_due", watched)
    settings = {"checkpoint_steps": 4, "max_epochs": 2}
    with new_run(tmp_path / "slow", **settings) as run:
        train(data, run=run, **settings)
        assert threading.main_thread() not in threads
        assert len(threads) == 3  # after steps 4 and 8, and at the end
        slow = run.load_checkpoint()
    monkeypatch.undo()
    with new_run(tmp_path / "quick", **settings) as run:
        train(data, run=run, **settings)
        quick = run.load_checkpoint()
    assert same_tensors(slow[0], quick[0])  # the state of the step in its name, not of a later one
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_a_checkpoint_holds_the_state_of_one_step(data, tmp_path, slow_writes):
    """Check a checkpoint that is written while training changes weights and lists."""
    gate, _ = slow_writes
    threading.Timer(0.3, gate.set).start()
    with new_run(tmp_path, checkpoint_steps=5, max_epochs=3) as run:
        train(data, run=run, checkpoint_steps=5, max_epochs=3)
        states = {}
        for file in run.checkpoints():
            with file.open("rb") as handle:
                header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
            state = json.loads(header["__metadata__"]["state"])
            states[state["step"]] = state
    assert {step: state["optimization_images"] for step, state in states.items()} == {12: 120, 10: 100}


def test_a_checkpoint_by_time_starts_only_after_the_previous_one_is_written(data, tmp_path, slow_writes):
    gate, threads = slow_writes
    threading.Timer(0.5, gate.set).start()
    with new_run(tmp_path, checkpoint_minutes=1e-9, max_epochs=3) as run:
        train(data, run=run, checkpoint_minutes=1e-9, max_epochs=3)
    assert 2 <= len(threads) <= 12


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_is_raised_after_the_next_step(data, tmp_path, monkeypatch, number):
    def failing(_):
        raise OSError(number, os.strerror(number))

    settings = {"checkpoint_steps": 2, "max_epochs": 3}
    run = new_run(tmp_path, **settings)
    monkeypatch.setattr(os, "fsync", failing)
    with run, pytest.raises(GreedyNASError, match=f"cannot write the checkpoint .*{os.strerror(number)}") as error:
        train(data, run=run, **settings)
    assert "the previous one is kept" in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(run.supernet.glob("*"))  # no partial file is left


def test_copies_of_tensors_do_not_change():
    tensors = {
        "a": torch.ones(3, 4, 2, 2).to(memory_format=torch.channels_last),
        "b": torch.arange(3),
        "c": torch.tensor(1.5),
    }
    tensors["d"] = torch.nn.Parameter(torch.ones(2))
    copies = copied(tensors)
    assert same_tensors(copies, tensors)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1)
    assert copies["a"].max() == 1
    assert copies["d"].requires_grad is False
    assert (copies["b"].tolist(), copies["c"].item()) == ([0, 1, 2], 1.5)


# Signals


def signalled(data, folder, number, at=5, **settings):
    """Run a training that gets a signal after a step."""
    due = checkpointing.Checkpointing.if_due

    def watched(self, path=None):
        if self.journal.state.step == at:
            os.kill(os.getpid(), number)
        due(self, path)

    checkpointing.Checkpointing.if_due = watched
    try:
        with signals.signals_caught(), new_run(folder, **settings) as run:
            train(data, run=run, **settings)
    finally:
        checkpointing.Checkpointing.if_due = due


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_training_with_a_checkpoint(data, tmp_path, number, code):
    handlers = [signal.getsignal(one) for one in signals.SIGNALS]
    with pytest.raises(signals.Stopped) as stop:
        signalled(data, tmp_path / "stopped", number, max_epochs=3)
    assert stop.value.exit_code == code
    assert "a checkpoint of step 5 is written; give the same command again to resume from there" in str(stop.value)
    assert [signal.getsignal(one) for one in signals.SIGNALS] == handlers
    results = []
    for name in ("stopped", "whole"):
        with new_run(tmp_path / name, max_epochs=3) as run:
            assert len(run.checkpoints()) == (name == "stopped")
            net, state = train(data, run=run, max_epochs=3)
        results.append((net.state_dict(), {**state.to_json(), "seconds": 0, "measured_ratio": 0, "metrics_length": 0}))
    assert same_tensors(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def get(number):
    os.kill(os.getpid(), number)
    time.sleep(1)  # Python handles signals between two bytecode instructions


def test_a_signal_outside_of_training_ends_the_process_at_once():
    with (
        pytest.raises(signals.Stopped, match="stopped by SIGTERM; finished work is kept"),
        signals.signals_caught(),
    ):
        get(signal.SIGTERM)


def test_a_signal_after_the_last_step_is_not_lost():
    with pytest.raises(signals.Stopped), signals.signals_caught(), signals.unhurried():
        get(signal.SIGTERM)


def test_an_error_that_the_signal_has_caused_is_not_reported_as_an_error(data, tmp_path, monkeypatch):
    """Check a step that fails because a scheduler has sent the signal to a process that the step needs."""
    monkeypatch.setattr(Recorder, "step", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), 1 / 0))
    with pytest.raises(signals.Stopped, match="the last checkpoint is kept"), signals.signals_caught():  # noqa: SIM117
        with new_run(tmp_path, max_epochs=1) as run:
            train(data, run=run, max_epochs=1)
    assert "the step was not finished" in (tmp_path / "log.txt").read_text()


class SwallowsSignals:
    """A stand-in for C code of torch and safetensors, which may turn a signal's exception into its own error."""

    def __init__(self, *_, **__):
        try:
            get(signal.SIGTERM)
        except signals.Stopped:
            raise TypeError("could not determine the shape") from None


def test_a_checkpoint_is_not_reported_as_damaged_if_a_signal_interrupts_its_reading(tmp_path, monkeypatch, caplog):
    saved = Checkpoints(tmp_path)
    saved.save(1, {"weight": torch.ones(2)}, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "safe_open", SwallowsSignals)
        with pytest.raises(signals.Stopped, match="stopped by SIGTERM"), signals.signals_caught():
            saved.load()
    assert "damaged" not in caplog.text
    assert saved.load()[1] == {"step": 1}


def test_an_error_made_of_a_signal_is_reported_as_the_signal():
    with pytest.raises(signals.Stopped, match="stopped by SIGTERM"), signals.signals_caught():
        SwallowsSignals()
    with pytest.raises(ZeroDivisionError), signals.signals_caught():  # the signal is forgotten afterwards
        1 / 0  # noqa: B018


def test_a_signal_waits_for_the_exporter(monkeypatch):
    """Check that no exception of a signal interrupts the exporter's C++ code, which would abort the process."""
    reached = []
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: (get(signal.SIGTERM), reached.append("the end")))
    with pytest.raises(signals.Stopped, match="stopped by SIGTERM"), signals.signals_caught():
        export_onnx(torch.nn.Identity(), torch.zeros(1))
    assert reached == ["the end"]


def test_ignored_signals_stay_ignored():
    """Check signals that `nohup` and background jobs of shells ignore."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.signals_caught():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            assert signals.requested() is None
    finally:
        signal.signal(signal.SIGINT, before)


# Out of memory


def too_large(most):
    def trial(images):
        if images > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return trial


@pytest.mark.parametrize(("most", "fits"), [(64, 64), (63, 32), (1, None)])
def test_the_largest_batch_that_fits_is_found(most, fits):
    assert largest_that_fits(64, too_large(most)) == fits


def test_an_out_of_memory_error_says_what_fits():
    with (
        pytest.raises(GreedyNASError, match=r"train\.batch_size = 64; 16 fits here: set train\.batch_size=16"),
        suggesting_what_fits("train.batch_size", 64, too_large(20), "lower something else"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(GreedyNASError, match="64 fits by itself: lower something else"),
        suggesting_what_fits("train.batch_size", 64, too_large(100), "lower something else"),
    ):
        torch.empty(2**60)
    with pytest.raises(ZeroDivisionError), suggesting_what_fits("x", 64, too_large(1), ""):
        1 / 0  # noqa: B018


def test_the_memory_of_a_failed_step_is_freed_before_the_next_trial():
    import weakref

    held = []

    def step():
        batch = torch.zeros(5)
        held.append(weakref.ref(batch))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def trial(_):
        assert held[0]() is None

    with pytest.raises(GreedyNASError, match="fits by itself"), suggesting_what_fits("x", 4, trial, ""):
        step()


def test_out_of_memory_errors_are_recognised():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
