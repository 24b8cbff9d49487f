"""Resuming: what it says, a search of a supernet that is not fully trained, and settings that may change."""

import io
import json

import pytest

import greedynas
from greedynas import GreedyNASError
from greedynas.jobs.resolving import settings_of
from greedynas.rundir.callbacks import Callback
from greedynas.runtime import signals
from greedynas.runtime.terminal import make_console
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.network_training import retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import Run
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.search_summary import report_searches
from greedynas.stages.train import train_stage
from tests.helpers.retraining import new_network
from tests.helpers.search import DATA
from tests.helpers.training import SETTINGS, rows_of, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")
NO_LIMITS = {"macs": (None, None), "params": (None, None), "latency_ms": (None, None)}


class Interrupting(Callback):
    """Ask the training to end after a step, as SIGTERM does."""

    def __init__(self, step):
        self.step = step

    def log(self, kind, step, epoch, values):
        if kind == "step" and step == self.step:
            signals._Request.number = 15

    def end(self):
        signals._Request.number = None


def config_of(photos, **train):
    settings = {"data": {**DATA, "source": str(photos)}, "train": {**SETTINGS, **train}}
    search = {"population": 6, "generations": 3}
    return Config(name="tiny", space=tiny_space(), search=search, **settings)


def said():
    return make_console(file=io.StringIO(), width=200)


@pytest.fixture
def interrupted(photos, tmp_path):
    with pytest.raises(signals.Stopped):
        train_stage(config_of(photos), tmp_path / "run", said(), callbacks=[Interrupting(6)])
    signals._Request.number = None
    return tmp_path / "run"


def test_resuming_says_from_which_step_and_what_is_left(interrupted, photos):
    console = said()
    train_stage(config_of(photos), interrupted, console)
    text = console.file.getvalue()
    assert "Resuming supernet from step 6 of 12 (epoch 2 of 3): 6 steps are left, about " in text
    again = said()
    train_stage(config_of(photos), interrupted, again)
    assert "Resuming" not in again.file.getvalue()


def test_resuming_a_retraining_says_it_too(data, tmp_path):
    short, long = (make_recipe(RetrainSettings(epochs=epochs, batch_size=8, lr=0.2)) for epochs in (3, 5))
    console = said()
    retrain(new_network(), data.train, short, folder=tmp_path, console=console)
    assert "Resuming" not in console.file.getvalue()
    retrain(new_network(), data.train, long, folder=tmp_path, console=console, title="macs-1M")
    assert "Resuming macs-1M from step" in console.file.getvalue()
    assert "(epoch 4 of 5)" in console.file.getvalue()


def requests(folder, **more):
    return make_requests(folder, {**NO_LIMITS, "macs": (["60K"], None)}, "evolution", (), True, None, [], None, **more)


def test_a_search_of_an_interrupted_supernet_says_so(interrupted, photos):
    with pytest.raises(GreedyNASError, match=r"not fully trained .step 6.; repeat its train command .* search --now"):
        search_stage(interrupted, requests(interrupted), None, said())
    console = said()
    (result,) = results = search_stage(interrupted, requests(interrupted, now=True), None, console, now=True)
    assert "The supernet is not fully trained: this search uses its checkpoint after step 6 (1 epoch)." in (
        console.file.getvalue()
    )
    assert (result["name"], result["supernet_step"], result["unfinished_epochs"]) == ("macs-60K-step-6", 6, 1)
    report_searches(results, interrupted, False, console)
    assert "macs-60K-step-6 is preliminary" in console.file.getvalue()
    record = greedynas.open_run(interrupted).searches["macs-60K-step-6"]
    assert record.unfinished_epochs == 1
    # The training goes on as if nothing had happened, and a search of the trained supernet is another one.
    train_stage(config_of(photos), interrupted, said())
    (final,) = search_stage(interrupted, requests(interrupted, now=True), None, said(), now=True)
    assert final["name"] == "macs-60K"
    assert "unfinished_epochs" not in final


def test_a_search_now_from_the_command_line(run_cli, interrupted):
    code, out, err = run_cli("search", interrupted, "--flops", "60K", "--now", "--json")
    assert code == 0
    assert json.loads(out)["searches"][0]["unfinished_epochs"] == 1
    assert "not fully trained" in err


def test_an_interrupted_search_says_how_far_it_was(interrupted, photos):
    train_stage(config_of(photos), interrupted, said())
    search_stage(interrupted, requests(interrupted), None, said())
    file = interrupted / "searches" / "macs-60K" / "search.json"
    found = json.loads(file.read_text())
    del found["chosen"], found["seconds"]
    found["found"] = found["found"][:6]
    file.write_text(json.dumps(found))
    console = said()
    search_stage(interrupted, requests(interrupted), None, console)
    assert "Resuming search macs-60K: 6 of at most 18 paths are evaluated" in console.file.getvalue()


def test_bookkeeping_may_change_on_resume_and_changes_no_result(interrupted, photos, tmp_path):
    train_stage(config_of(photos), tmp_path / "whole", said())
    train_stage(config_of(photos, log_every=3, accuracy_images=6, keep_checkpoints=5), interrupted, said())
    steps = [row["step"] for row in rows_of(interrupted)["step"]]
    assert steps == [1, 2, 3, 4, 5, 6, 8, 9, 12]  # every third, and the last of an epoch
    pools = [(folder / "supernet" / "pool.json").read_bytes() for folder in (interrupted, tmp_path / "whole")]
    assert pools[0] == pools[1]
    with pytest.raises(GreedyNASError, match=r"train.lr is 0.05 there, 0.1 here"):
        train_stage(config_of(photos, lr=0.1), interrupted, said())


def test_bookkeeping_may_change_when_auto_has_chosen_the_rest(photos, tmp_path):
    changes = {"data.source": str(photos), "train.max_epochs": 2, "image_size": 16}
    config, _ = settings_of("auto", changes, tmp_path / "run", said())
    with Run.start(tmp_path / "run", config):
        pass
    more = {"log_every": 7, "train.checkpoint_minutes": 1.5, "data.workers": 0, "callbacks": ["tensorboard"]}
    resumed, _ = settings_of("auto", {**changes, **more}, tmp_path / "run", said())
    assert (resumed.train.log_every, resumed.train.checkpoint_minutes, resumed.data.workers) == (7, 1.5, 0)
    assert resumed.callbacks == ("tensorboard",)
    assert resumed.train.lr == config.train.lr
    with pytest.raises(GreedyNASError, match="was started with auto"):
        settings_of("auto", {**changes, "train.lr": 0.5}, tmp_path / "run", said())
