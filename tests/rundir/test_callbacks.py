"""Callbacks: they observe a training and may end it."""

import sys
from types import ModuleType

import pytest

from greedynas import GreedyNASError
from greedynas.rundir import journal
from greedynas.rundir.callbacks import CALLBACKS, Callback, first_reason, make_callbacks
from greedynas.rundir.trackers.tensorboard import TensorBoard
from tests.helpers.training import new_run, recorded, rows_of, same_tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Watching(Callback):
    """A callback that records all calls and ends the training after a number of epochs."""

    def __init__(self, epochs=None):
        self.epochs, self.calls, self.rows = epochs, [], []

    def begin(self, folder, step):
        self.calls.append(("begin", folder, step))

    def log(self, kind, step, epoch, values):
        self.rows.append({"kind": kind, "step": step, "epoch": epoch, **values})

    def stop(self, state):
        self.calls.append(("stop", state.epoch, state.step))
        return "that will do" if state.epoch == self.epochs else None

    def end(self):
        self.calls.append(("end",))


def test_a_callback_gets_the_values_of_the_metrics(data, tmp_path):
    watching = Watching()
    net, state, rows = recorded(tmp_path / "run", data, callbacks=[watching])
    assert watching.calls == [
        ("begin", tmp_path / "run", 0),
        ("stop", 1, 4),
        ("stop", 2, 8),  # no call after the last epoch, when training ends anyway
        ("end",),
    ]
    for kind, written in rows.items():
        assert [row for row in watching.rows if row["kind"] == kind] == written
        assert written
    assert state.stopped == "max_epochs reached"
    alone, _ = train(data)
    assert same_tensors(net.state_dict(), alone.state_dict())  # a callback does not change the training


def test_a_training_that_is_not_saved_has_callbacks(data):
    watching = Watching()
    train(data, callbacks=[watching])
    assert watching.calls[0] == ("begin", None, 0)
    assert {row["kind"] for row in watching.rows} == {"step", "filter", "epoch"}


def test_a_callback_ends_the_training_with_its_reason(data, tmp_path):
    watching, others = Watching(epochs=2), Watching()
    _, state, rows = recorded(tmp_path / "run", data, callbacks=[others, watching])
    assert (state.epoch, state.step, state.stopped) == (2, 8, "that will do")
    assert [row["stopped"] for row in rows["epoch"]] == [None, "that will do"]
    assert others.calls[-1] == watching.calls[-1] == ("end",)
    # The training is over: the same command again trains nothing and calls no callback.
    later = Watching()
    _, again, _ = recorded(tmp_path / "run", data, callbacks=[later])
    assert (again.step, again.stopped, later.calls) == (8, "that will do", [])


def test_the_papers_principle_comes_first_and_then_the_first_callback(data):
    watching = [Watching(epochs=3)]
    _, state = train(data, callbacks=watching)
    assert state.stopped == "max_epochs reached"
    assert first_reason([Watching(), Watching(epochs=3), Watching(epochs=3)], state) == "that will do"
    assert first_reason([], state) is first_reason([Watching()], state) is None


def test_callbacks_end_even_if_the_training_fails(data, tmp_path):
    class Failing(Watching):
        def log(self, kind, step, epoch, values):
            if step == 6:
                raise GreedyNASError("the disk of the other machine is full")

    failing, others = Failing(), Watching()
    with new_run(tmp_path / "run") as run, pytest.raises(GreedyNASError, match="the other machine"):
        train(data, run=run, callbacks=[failing, others])
    assert failing.calls[-1] == others.calls[-1] == ("end",)
    resumed = Watching()
    recorded(tmp_path / "run", data, callbacks=[resumed], checkpoint_steps=1)
    assert resumed.calls[0] == ("begin", tmp_path / "run", 0)  # no checkpoint was saved before
    assert len(rows_of(tmp_path / "run")["step"]) == 12


def test_callbacks_are_found_by_name(registered):
    registered(CALLBACKS, "watching", Watching)
    first, second, board = make_callbacks(["watching", "watching", "tensorboard"])
    assert first is not second
    assert (type(first), type(board)) == (Watching, TensorBoard)
    with pytest.raises(GreedyNASError, match="unknown callback 'neptune'; known: tensorboard, wandb, mlflow, watching"):
        make_callbacks(["neptune"])


def test_tensorboard_gets_the_numbers_if_it_is_installed(data, tmp_path, monkeypatch):
    """Record the calls of a stand-in for TensorBoard."""
    written, made, closed, histograms = [], [], [], []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def add_histogram(self, name, values, step):
            histograms.append((name, len(values)))

        def close(self):
            closed.append(True)

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(journal, "find_spec", lambda name: name == "tensorboard")
    _, _, rows = recorded(tmp_path / "run", data)
    assert (made, closed) == ([(str(tmp_path / "run" / "tensorboard"), 0)], [True])
    losses = [(value, step) for name, value, step in written if name == "step/loss"]
    assert losses == [(row["loss"], row["step"]) for row in rows["step"]]
    names = {name for name, *_ in written}
    assert {"step/lr", "step/epsilon", "filter/pool_best", "epoch/pool_size"} <= names
    assert not {"filter/kept", "epoch/stopped", "step/pi"} & {name for name, value, _ in written if value is None}
    assert {name for name, _ in histograms} == {"filter/kept", "filter/rejected"}
    made.clear()
    train(data)  # without a folder
    assert made == []
