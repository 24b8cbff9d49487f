"""Averaged weights of a supernet (`train.ema`)."""

import pytest
import torch

from greedynas.models.ema import evaluated
from greedynas.rundir.checkpoints import read_checkpoint
from greedynas.settings.schema import Config
from greedynas.stages.run import Run
from greedynas.stages.search import load_supernet
from greedynas.studies.supernets import load_trained
from tests.helpers.training import SETTINGS, new_net, recorded, same_tensors, snapshot, tiny_space, train

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY = 0.8
EVERY_STEP = {"ema": DECAY, "max_epochs": 2, "checkpoint_steps": 1, "keep_checkpoints": 1000}


@pytest.fixture
def averaged(data, tmp_path):
    """A training with an average, and the checkpoints of its steps, by step."""
    net, state, _ = recorded(tmp_path / "run", data, **EVERY_STEP)
    files = sorted((tmp_path / "run" / "supernet").glob("*.safetensors"))
    assert len(files) == state.step > 5
    return net, [read_checkpoint(file)[0] for file in files]


def test_the_average_of_all_steps(averaged):
    """A weight is averaged at every step, whether its op was trained or not; at first the average follows closely."""
    expected = {name: tensor for name, tensor in snapshot(new_net()).items() if tensor.is_floating_point()}
    _, checkpoints = averaged
    for step, tensors in enumerate(checkpoints, 1):
        decay = min(DECAY, step / (step + 10))
        expected = {name: decay * mean + (1 - decay) * tensors[f"net.{name}"] for name, mean in expected.items()}
        kept = {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}
        assert kept.keys() == expected.keys()
        for name, mean in expected.items():
            torch.testing.assert_close(kept[name], mean)
    last = checkpoints[-1]
    assert not torch.equal(last["net.classifier.weight"], last["ema.classifier.weight"])


def test_training_itself_does_not_change(data, averaged):
    _, checkpoints = averaged
    plain, _ = train(data, max_epochs=2)
    trained = {name.removeprefix("net."): t for name, t in checkpoints[-1].items() if name.startswith("net.")}
    assert same_tensors(plain.state_dict(), trained)


def test_what_is_evaluated_are_averaged_weights(data, averaged, tmp_path):
    """By the net that training leaves, by a search, and by the studies."""
    net, checkpoints = averaged
    expected = {name.removeprefix("net."): tensor for name, tensor in evaluated(checkpoints[-1]).items()}
    assert torch.equal(expected["classifier.weight"], checkpoints[-1]["ema.classifier.weight"])
    assert same_tensors(net.state_dict(), expected)
    config = Config(name="tiny", space=tiny_space(), train={**SETTINGS, "ema": DECAY}, device="cpu")
    assert same_tensors(load_trained(tmp_path / "run", config, data).net.state_dict(), expected)
    with Run.open(tmp_path / "run") as run:
        run.check_data(data)
        assert same_tensors(load_supernet(run, config, data)[0].state_dict(), expected)


def test_a_finished_training_that_is_asked_for_again(data, averaged, tmp_path):
    net, _ = averaged
    again, _, _ = recorded(tmp_path / "run", data, **EVERY_STEP)
    assert same_tensors(again.state_dict(), net.state_dict())
