"""How a supernet starts from a pretrained network: channels in the order of their importance, smaller blocks refitted.

The importance of a hidden channel is what the output of its block loses in variance without it, ‖w‖² · Var(h): the weights
that read the channel, and how much the channel varies over images after activation and squeeze-and-excitation. What it adds on
average is left out, because BatchNorm takes it away. Each smaller version of a block is then fitted to the output of the whole
block by least squares, on the images that the whole block sees in the pretrained network.
"""

import torch
from torch import Tensor, nn

from greedynas.models.base_blocks import Bottleneck
from greedynas.models.network import Network
from greedynas.models.shared_supernet import SharedLayer, SharedSupernet, SharedWeights, SlicedBottleneck, slice_norm

RIDGE = 1e-3  # of the mean variance of the hidden channels: the fit has thousands of pixels, which are alike


@torch.no_grad()
def start_from_base(net: SharedSupernet, whole: Network, images: Tensor) -> None:
    """Give a supernet around a pretrained network the weights of that network.

    Args:
        net: The supernet. Its whole path then computes what the network computes.
        whole: The pretrained network, as `network_of_base` returns it. It is changed: its channels are put into order.
        images: Some images, normalised, at the size that importance is measured at.
    """
    whole.eval()
    stem, neck = (net.layers[0].stem if net.space.sizes else net.stem), net.neck
    for part, source in ((stem, whole.stem), (net.head, whole.head), (net.classifier, whole.classifier)):
        part.load_state_dict(source.state_dict())  # type: ignore[union-attr]
    if neck is not None and whole.neck is not None:
        neck.load_state_dict(whole.neck.state_dict())
    x = whole.stem(images)
    layers = list(net.layers)[1 if net.space.sizes else 0 :]
    blocks = [block for stage in whole.stages.children() for block in stage.children()]
    for layer, block in zip(layers, blocks, strict=True):
        assert isinstance(layer, SharedLayer)
        assert isinstance(block, Bottleneck)
        start_layer(layer, block, x)
        x = block(x)


def start_layer(layer: SharedLayer, block: Bottleneck, x: Tensor) -> None:
    """Give the ops of a layer the weights of a pretrained block, refitted on inputs of the block."""
    if block.expand is not None:
        order_channels(block, x)
    assert layer.shared is not None
    share_weights(layer.shared, block)
    target = block.project.conv(hidden_channels(block, x))
    for op in layer.ops:
        if isinstance(op, SlicedBottleneck):
            start_op(op, block, x, target)


def hidden_channels(block: Bottleneck, x: Tensor) -> Tensor:
    """Return what the last convolution of a block sees."""
    out = x if block.expand is None else block.expand(x)
    out = block.depthwise(out)
    return out if block.se is None else block.se(out)


def order_channels(block: Bottleneck, x: Tensor) -> None:
    """Put the hidden channels of a block into the order of their importance. The block computes the same."""
    variance = hidden_channels(block, x).var(dim=(0, 2, 3))
    importance = block.project.conv.weight.square().sum(dim=(0, 2, 3)) * variance
    order = importance.argsort(descending=True, stable=True)
    assert block.expand is not None
    tensors: list[Tensor] = [block.expand.conv.weight, block.depthwise.conv.weight]
    tensors += [
        value for part in (block.expand, block.depthwise) for value in part.norm.state_dict().values() if value.ndim
    ]
    if block.se is not None:
        assert block.se.expand.bias is not None
        tensors += [block.se.expand.weight, block.se.expand.bias]
        block.se.reduce.weight.copy_(block.se.reduce.weight[:, order])
    for tensor in tensors:
        tensor.copy_(tensor[order])
    block.project.conv.weight.copy_(block.project.conv.weight[:, order])


def share_weights(shared: SharedWeights, block: Bottleneck) -> None:
    """Copy the weights of a block to where all ops of a layer share them."""
    pairs: list[tuple[nn.Module | None, nn.Module | None]] = [
        (shared.depthwise, block.depthwise.conv),
        (shared.project, block.project.conv),
    ]
    if block.expand is not None:
        pairs.append((shared.expand, block.expand.conv))
    if block.se is not None:
        pairs += [(shared.reduce, block.se.reduce), (shared.excite, block.se.expand)]
    for mine, other in pairs:
        for place, value in zip(mine.parameters(), other.parameters(), strict=True):  # type: ignore[union-attr]
            place.copy_(value)


def start_op(op: SlicedBottleneck, block: Bottleneck, x: Tensor, target: Tensor) -> None:
    """Give an op the normalisations of its block, with the statistics of its own activations, and fit its output."""
    if op.expand_norm is not None and block.expand is not None:
        slice_norm(op.expand_norm, _norm(block.expand.norm))
    slice_norm(op.depthwise_norm, _norm(block.depthwise.norm))
    slice_norm(op.project_norm, _norm(block.project.norm))
    op.eval()
    whole = op.hidden == block.project.conv.in_channels and op.kernel == block.depthwise.conv.kernel_size[0]
    if whole and bool(op.squeeze) == (block.se is not None):
        return
    if op.kernel < block.depthwise.conv.kernel_size[0]:
        _measure(op.depthwise_norm, op, x)
    hidden = op.hidden_channels(x)
    if op.project is None:
        shift = op.projected(hidden).mean((0, 2, 3)) - target.mean((0, 2, 3))
    else:
        weight, shift = least_squares(hidden, target)
        op.project.weight.copy_(weight[:, :, None, None])
    # What the fit lacks on average, the running mean takes away.
    op.project_norm.running_mean += shift  # type: ignore[operator]


def _measure(norm: nn.BatchNorm2d, op: SlicedBottleneck, x: Tensor) -> None:
    """Replace the running statistics of one normalisation by those of some images."""
    norm.train()
    momentum, norm.momentum = norm.momentum, 1.0
    op.hidden_channels(x)
    norm.momentum = momentum
    norm.eval()


def least_squares(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a 1×1 convolution with biases to a target: (out, in) weights, and what is to be subtracted from its output."""
    h, t = (values.movedim(1, 3).flatten(0, 2).double() for values in (hidden, target))
    h_mean, t_mean = h.mean(0), t.mean(0)
    h, t = h - h_mean, t - t_mean
    gram = h.T @ h
    gram.diagonal().add_(RIDGE * gram.diagonal().mean() + 1e-12)
    weight = torch.linalg.solve(gram, h.T @ t).T
    return weight.float(), (weight @ h_mean - t_mean).float()


def _norm(module: nn.Module) -> nn.BatchNorm2d:
    assert isinstance(module, nn.BatchNorm2d)
    return module
