"""Callbacks: what watches a training is told of it, and may end it."""

import sys
from types import ModuleType

import pytest

from greedynas import GreedyNASError
from greedynas.rundir import journal
from greedynas.rundir.callbacks import CALLBACKS, Callback, first_reason, make_callbacks
from greedynas.rundir.tensorboard import TensorBoard
from tests.helpers.training import new_run, recorded, rows_of, same_tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Watching(Callback):
    """Remembers all calls; ends the training after so many epochs."""

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


def test_a_callback_is_told_what_the_metrics_say(data, tmp_path):
    watching = Watching()
    net, state, rows = recorded(tmp_path / "run", data, callbacks=[watching])
    assert watching.calls == [
        ("begin", tmp_path / "run", 0),
        ("stop", 1, 4),
        ("stop", 2, 8),  # of an epoch that is the last anyway nobody is asked
        ("end",),
    ]
    for kind, written in rows.items():
        assert [row for row in watching.rows if row["kind"] == kind] == written
        assert written
    assert state.stopped == "max_epochs reached"
    alone, _ = train(data)
    assert same_tensors(net.state_dict(), alone.state_dict())  # watching changes nothing


def test_a_training_that_is_not_saved_has_callbacks_too(data):
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
    # It is over: the same command again trains nothing, and calls nobody.
    later = Watching()
    _, again, _ = recorded(tmp_path / "run", data, callbacks=[later])
    assert (again.step, again.stopped, later.calls) == (8, "that will do", [])


def test_the_papers_principle_comes_first_and_then_the_first_callback(data):
    watching = [Watching(epochs=3)]
    _, state = train(data, callbacks=watching)
    assert state.stopped == "max_epochs reached"
    assert first_reason([Watching(), Watching(epochs=3), Watching(epochs=3)], state) == "that will do"
    assert first_reason([], state) is first_reason([Watching()], state) is None


def test_callbacks_end_however_the_training_ends(data, tmp_path):
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
    assert resumed.calls[0] == ("begin", tmp_path / "run", 0)  # nothing had been saved
    assert len(rows_of(tmp_path / "run")["step"]) == 12


def test_callbacks_by_name(registered):
    registered(CALLBACKS, "watching", Watching)
    first, second, board = make_callbacks(["watching", "watching", "tensorboard"])
    assert first is not second
    assert (type(first), type(board)) == (Watching, TensorBoard)
    with pytest.raises(GreedyNASError, match="unknown callback 'wandb'; known: tensorboard, watching"):
        make_callbacks(["wandb"])


def test_tensorboard_gets_the_numbers_where_it_is_installed(data, tmp_path, monkeypatch):
    """A stand-in for it: what is called how."""
    written, made, closed = [], [], []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            closed.append(True)

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(journal, "find_spec", lambda name: name == "tensorboard")
    monkeypatch.setattr("greedynas.rundir.tensorboard.require_packages", lambda *_: None)
    _, _, rows = recorded(tmp_path / "run", data)
    assert (made, closed) == ([(str(tmp_path / "run" / "tensorboard"), 0)], [True])
    losses = [(value, step) for name, value, step in written if name == "step/loss"]
    assert losses == [(row["loss"], row["step"]) for row in rows["step"]]
    names = {name for name, *_ in written}
    assert {"step/lr", "step/epsilon", "filter/pool_best", "epoch/pool_size"} <= names
    assert not {"filter/kept", "epoch/stopped", "step/pi"} & {name for name, value, _ in written if value is None}
    made.clear()
    train(data)  # in no folder
    assert made == []
