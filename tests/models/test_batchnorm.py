"""Tests of the modes of BatchNorm in evaluation: the built-in ones and those of plugins."""

import pytest
import torch
from torch import nn

from greedynas import GreedyNASError, Supernet
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.settings import SearchSettings, TrainSettings
from greedynas.models.batchnorm import BN_MODES, BatchNormMode, bn_mode, calibrates
from tests.helpers.supernet import with_lively_statistics
from tests.helpers.training import SETTINGS, same_tensors, tiny_space, train

PATH = (1, 2, 1, 2)


def lively():
    return with_lively_statistics(Supernet(tiny_space(), generator=torch.Generator().manual_seed(0)))


def facts(net):
    names = ("training", "momentum", "track_running_stats", "eps")
    return [[getattr(module, name, None) for name in names] for module in net.modules()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", BN_MODES.names())
def test_bn_mode_leaves_the_network_unchanged(mode, training):
    net = lively().train(training)
    net.layers[0].eval()  # not all modules are alike
    before, weights = facts(net), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    buffers = [id(buffer) for buffer in net.buffers()]
    with bn_mode(net, mode):
        net(torch.randn(4, 3, 8, 8), PATH)
    assert facts(net) == before
    assert [id(buffer) for buffer in net.buffers()] == buffers
    assert same_tensors(net.state_dict(), weights)


@pytest.mark.parametrize("mode", BN_MODES.names())
def test_bn_mode_leaves_the_network_unchanged_after_an_error(mode):
    net = lively().train()
    before = facts(net)

    def failing():
        with bn_mode(net, mode):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert facts(net) == before


def test_batch_and_running_mode_normalise_by_their_statistics():
    net, images = lively().train(), torch.randn(6, 3, 8, 8)
    norm = net.stem[0].norm
    outputs = {}
    norm.register_forward_hook(lambda module, inputs, output: outputs.update(seen=(inputs[0], output.clone())))
    found = {}
    for mode in ("batch", "running"):
        with bn_mode(net, mode) as made, torch.no_grad():
            assert made == []
            net(images, PATH)
            inputs, found[mode] = outputs["seen"]
    of_the_batch = nn.functional.batch_norm(inputs, None, None, norm.weight, norm.bias, training=True)
    of_training = nn.functional.batch_norm(inputs, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    torch.testing.assert_close(found["batch"], of_the_batch)
    torch.testing.assert_close(found["running"], of_training)


def test_recalibration_uses_buffers_of_its_own():
    net = lively().train()
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    with bn_mode(net, "recalibrate") as made:
        assert len(made) == 3 * len(norms)
        assert {norm.momentum for norm in norms} == {1.0}
    assert calibrates("recalibrate")
    assert not calibrates("batch")


# A mode of a plugin


class Blurred(BatchNormMode):
    """Use the running averages with a larger epsilon."""

    changes = ("eps",)

    @staticmethod
    def prepare(norm):
        norm.eps = 1.0
        return []


@pytest.mark.usefixtures("one_thread")
def test_a_plugin_mode_works_in_settings_evaluation_and_training(data, registered):
    registered(BN_MODES, "blurred", Blurred)
    assert TrainSettings(bn="blurred").bn == SearchSettings(bn="blurred").bn == "blurred"
    net, (images, labels) = lively(), data.val.eval_batch()
    before = facts(net)
    found = evaluate_paths(net, [PATH], images, labels, "blurred").losses[0]
    assert facts(net) == before
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1.0
    assert found == pytest.approx(evaluate_paths(net, [PATH], images, labels, "running").losses[0])
    assert found != pytest.approx(evaluate_paths(lively(), [PATH], images, labels, "running").losses[0])
    _, state = train(data, bn="blurred")
    assert state.evaluation_images > 0
    assert state.evaluation_images % SETTINGS["filter_images"] == 0  # it calibrates nothing


def test_an_unknown_mode_is_refused():
    with pytest.raises(GreedyNASError, match="unknown BatchNorm mode 'blurred'"), bn_mode(lively(), "blurred"):
        pass
