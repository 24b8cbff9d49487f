"""Single-Path NAS: gated superkernels against sums of separate convolutions, and slices against separate networks."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from greedynas import GreedyNASError, build_network, load_space
from greedynas.greedy.methods.single_path import WIDTH, Gated, Parts, SinglePath, part_sizes
from greedynas.models.shared_supernet import SharedSupernet
from tests.helpers.method_references import double_net, draw_of, entropy, expected_cost, prepared, space_of
from tests.helpers.training import train

pytestmark = pytest.mark.usefixtures("one_thread")
GRID = ("ID", "MB2_K3", "MB2_K5", "MB2_K7", "MB4_K3", "MB4_K5", "MB4_K7")


def ready(data, space, seed=1, **settings):
    """Return a supernet, a draw, and the method with thresholds that decide for different parts."""
    net = double_net(space, shared=True)
    draw = draw_of(net, data, "single-path", **settings)
    method = prepared(SinglePath(), draw, [np.zeros(parts.thresholds) for parts in map(Parts.of, space.layers)])
    method.sizes = [part_sizes(layer, parts) for layer, parts in zip(net.layers, method.parts, strict=True)]
    rng = np.random.default_rng(seed)
    for layer, sizes in zip(method.alpha, method.sizes, strict=True):
        margins = rng.normal(size=len(sizes)) * WIDTH  # of the sizes above the thresholds
        if len(margins) > 2 and margins[0] < 0:  # no outer ring without the inner one
            margins[1] = -abs(margins[1])
        layer.data = sizes - torch.from_numpy(margins)
    return net, draw, method


@pytest.mark.parametrize("seed", range(3))
def test_the_gated_layers_compute_the_decided_path(data, seed):
    net, draw, method = ready(data, space_of(GRID), seed)
    path = method.most_probable()
    images, _ = draw.learning._validation_batch()
    gated = net(images, Gated(path, method.parts, method.chances()))
    torch.testing.assert_close(gated, net(images, path), rtol=1e-9, atol=1e-9)


def test_thresholds_decide_by_the_size_of_the_weights(data):
    """A part is used if its mean square, relative to that of the whole kernel, is above its threshold."""
    net, _, method = ready(data, space_of(GRID))
    layer, parts = net.layers[1], method.parts[1]
    assert (parts.kernels, parts.widths, parts.skips, parts.thresholds) == ((3, 5, 7), (16, 32), True, 4)
    weight = layer.shared.depthwise.weight.detach()
    whole = weight.square().mean()
    inner, middle = weight[:, :, 2:5, 2:5].square().sum(), weight[:, :, 1:6, 1:6].square().sum()
    sizes = [
        (middle - inner) / (32 * 16) / whole,
        (weight.square().sum() - middle) / (32 * 24) / whole,
        weight[16:].square().mean() / whole,
        weight[:16].square().mean() / whole,
    ]
    torch.testing.assert_close(part_sizes(layer, parts), torch.stack(sizes))
    above, below = -0.1, 0.1
    for thresholds, op in (
        ((above, above, above, above), "MB4_K7"),
        ((above, below, above, above), "MB4_K5"),
        ((below, below, above, above), "MB4_K3"),
        ((above, above, below, above), "MB2_K7"),
        ((below, below, below, above), "MB2_K3"),
        ((above, above, above, below), "ID"),
        ((below, below, below, below), "ID"),
    ):
        method.alpha[1].data = torch.stack(sizes) + torch.tensor(thresholds)
        assert GRID[method.most_probable()[1]] == op


def reference_loss(net, images, labels, method, gates):
    """Return the loss with gates as free numbers: a sum of convolutions with the parts, and sums over channel groups."""
    x = net.stem(images)
    layers = zip(net.layers, method.parts, gates, method.most_probable(), method.chances(), strict=True)
    for layer, parts, gate, path_op, chances in layers:
        rings, further, skip = gate[:2], gate[2:3], gate[3]
        inner = path_op
        if parts.shapes[path_op] is None:  # skipped: the parts are decided as if it were not
            probable = parts.op_probabilities(chances).tolist()
            inner = max((i for i, shape in enumerate(parts.shapes) if shape is not None), key=probable.__getitem__)
        op, widest = layer.ops[inner], layer.ops[GRID.index("MB4_K3")]

        def norm(x, name, op=op, widest=widest):
            own, wide = getattr(op, name), getattr(widest, name)
            count = own.num_features
            scale = torch.cat((own.weight, wide.weight[count:]))
            shift = torch.cat((own.bias, wide.bias[count:]))
            return F.batch_norm(x, None, None, scale, shift, training=True, eps=own.eps)

        shared = layer.shared
        hidden = F.relu(norm(F.conv2d(x, shared.expand.weight), "expand_norm"))
        weight, groups, stride = shared.depthwise.weight, shared.depthwise.weight.shape[0], op.layer.stride
        conv = 0
        for size, before, factor in ((3, 0, 1), (5, 3, rings[0]), (7, 5, rings[0] * rings[1])):
            part = torch.zeros_like(weight)
            low = (7 - size) // 2
            part[..., low : low + size, low : low + size] = weight[..., low : low + size, low : low + size]
            if before:
                low = (7 - before) // 2
                part[..., low : low + before, low : low + before] = 0
            conv = conv + factor * F.conv2d(hidden, part, stride=stride, padding=3, groups=groups)
        hidden = F.relu(norm(conv, "depthwise_norm"))
        half, project = groups // 2, shared.project.weight
        out = F.conv2d(hidden[:, :half], project[:, :half]) + further[0] * F.conv2d(hidden[:, half:], project[:, half:])
        out = F.batch_norm(out, None, None, op.project_norm.weight, op.project_norm.bias, training=True)
        same = op.layer.in_channels == op.layer.out_channels and stride == 1
        out = out + x if same else out
        x = skip * out + (1 - skip) * layer.ops[0](x)
    return entropy(net.classifier(net.head(x).mean((2, 3))), labels)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_thresholds_goes_through_the_sigmoids(data, seed):
    space = space_of(GRID)
    _, draw, method = ready(data, space, seed, target={"max_macs": 20_000}, cost_weight=0.3)
    images, labels = draw.learning._validation_batch()
    sizes = [layer.clone() for layer in method.sizes]
    leaves = [layer.detach().clone().requires_grad_() for layer in method.alpha]
    soft = [torch.sigmoid((size - leaf) / WIDTH) for size, leaf in zip(sizes, leaves, strict=True)]
    hard = []
    for op, parts, chances in zip(method.most_probable(), method.parts, soft, strict=True):
        bits = (chances.detach() > 0.5).double()
        hard.append(bits if parts.shapes[op] is not None else torch.cat((bits[:3], torch.zeros(1))))
    gates = [on.clone().requires_grad_() for on in hard]
    reference = double_net(space, shared=True)
    by_gate = torch.autograd.grad(reference_loss(reference, images, labels, method, gates), gates)
    shares = []
    for parts, chances in zip(method.parts, soft, strict=True):
        scores = []
        for shape in parts.shapes:
            kernel, width = shape or (0, 0)
            on = [kernel >= 5, kernel >= 7, width >= parts.widths[1]]
            score = 1.0
            for j in range(3):
                best = torch.maximum(chances[j], 1 - chances[j])
                score = score * (best if shape is None else chances[j] if on[j] else 1 - chances[j])
            scores.append(score * (1 - chances[3] if shape is None else chances[3]))
        shares.append(torch.stack(scores) / sum(scores))
    expected = expected_cost(space, shares)
    assert expected.item() > 20_000
    objective = 0.3 * torch.log(expected / 20_000)
    objective = objective + sum((chances * part).sum() for chances, part in zip(soft, by_gate, strict=True))
    wanted = torch.autograd.grad(objective, leaves)
    method.learn(draw, draw.learning)
    for layer, gradient in zip(method.alpha, wanted, strict=True):
        torch.testing.assert_close(layer.grad, gradient, rtol=1e-7, atol=1e-11)


def test_slices_are_separate_networks_with_the_same_costs():
    space = space_of(GRID)
    net = double_net(space, shared=True).eval()
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for path in ((1, 2, 3, 4), (6, 5, 0, 1), (0, 6, 4, 2)):
        network = build_network(path, space).double().eval()
        network.load_state_dict(net.subnet(path).state_dict())
        torch.testing.assert_close(network(images.double()), net(images, path), rtol=1e-9, atol=1e-9)
        assert sum(parameter.numel() for parameter in network.parameters()) == space.costs([path]).params[0]


def test_updates_train_the_decided_path_alone(data):
    _, state = train(data, space_of(), net=SharedSupernet(space_of()), sampler="single-path", warmup=0, max_epochs=1)
    assert state.optimization_images == 4 * (10 + 10)


@pytest.mark.parametrize(
    ("space", "told"),
    [(space_of(("ID", "MB2_K3", "MB3_K3_SE")), "tiny also has MB3_K3_SE"), (load_space("shufflenet"), "also has")],
)
def test_ops_that_are_no_slices_are_refused(space, told):
    with pytest.raises(GreedyNASError, match=told):
        SinglePath().check(space)


def test_a_supernet_without_shared_weights_is_refused(data):
    with pytest.raises(GreedyNASError, match="'single-path' trains a SharedSupernet, not a Supernet"):
        train(data, space_of(), sampler="single-path")
