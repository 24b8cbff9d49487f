"""The building blocks of networks as plain torch modules, one for each op name of `spaces/ops.py`."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.gpu import ends, engine
from greedynas.models.base_blocks import Bottleneck, Resize, make_base_block
from greedynas.spaces.ops import CUSTOM, custom_op, is_nothing, parse_op, squeeze_channels
from greedynas.spaces.space import Layer

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "hard_swish": nn.Hardswish}


class ConvNorm(nn.Module):
    """A convolution, BatchNorm and, optionally, an activation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        activation: str | None = None,
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.activation = ACTIVATIONS[activation](inplace=True) if activation else None

    def forward(self, x: Tensor) -> Tensor:
        if ends.gathers(self, x):
            return ends.gathered(self, x)
        x = self._convolve(x)
        if engine.applies(x, self.norm):
            return engine.norm_act(x, self.norm, self.activation)
        x = self.norm(x)
        return x if self.activation is None else self.activation(x)

    def _convolve(self, x: Tensor) -> Tensor:
        # On CPUs with AVX-512 the backward pass of a strided 1x1 convolution over few channels writes out of bounds
        # (uxlfoundation/oneDNN#6035): select the pixels that it reads, then convolve without a stride.
        stride, pointwise = self.conv.stride[0], self.conv.kernel_size == (1, 1)
        if pointwise and stride > 1 and x.device.type == "cpu" and torch.is_grad_enabled():
            return F.conv2d(x[:, :, ::stride, ::stride], self.conv.weight)
        return self.conv(x)


class SqueezeExcite(nn.Module):
    """Channel attention (Hu et al., 2018) with hard-swish inside and a hard-sigmoid gate."""

    def __init__(self, channels: int):
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeeze_channels(channels), 1)
        self.expand = nn.Conv2d(squeeze_channels(channels), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean((2, 3), keepdim=True)
        return x * F.hardsigmoid(self.expand(F.hardswish(self.reduce(gate))))


class MBConv(nn.Module):
    """An inverted bottleneck (MobileNetV2): expand, depthwise, squeeze-excite, project; residual if shapes agree."""

    writes_to_places = True  # the engine can write its output and its input's gradient into buffers of a recorded step

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, expansion: float, kernel: int, se: bool, activation: str
    ):
        super().__init__()
        hidden = round(expansion * in_channels)
        self.expand = ConvNorm(in_channels, hidden, activation=activation) if expansion != 1 else None
        self.depthwise = ConvNorm(hidden, hidden, kernel, stride, groups=hidden, activation=activation)
        self.se = SqueezeExcite(hidden) if se else None
        self.project = ConvNorm(hidden, out_channels)
        self.residual = in_channels == out_channels and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        if engine.takes(self, x):
            return engine.mbconv(self, x)
        out = x if self.expand is None else self.expand(x)
        out = self.depthwise(out)
        out = out if self.se is None else self.se(out)
        out = self.project(out)
        return x + out if self.residual else out


class ShuffleUnit(nn.Module):
    """A ShuffleNetV2 unit: at stride 1 half of the channels pass unchanged, at stride 2 they are projected.

    `xception` replaces the single depthwise convolution by three, as in Single Path One-Shot.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, kernel: int, xception: bool, activation: str):
        super().__init__()
        source = in_channels // 2 if stride == 1 else in_channels
        middle, grown = out_channels // 2, out_channels - source

        def pointwise(before: int, after: int) -> ConvNorm:
            return ConvNorm(before, after, activation=activation)

        def depthwise(channels: int, stride: int = 1) -> ConvNorm:
            return ConvNorm(channels, channels, kernel, stride, groups=channels)

        if xception:
            parts = [depthwise(source, stride), pointwise(source, middle), depthwise(middle)]
            parts += [pointwise(middle, middle), depthwise(middle), pointwise(middle, grown)]
        else:
            parts = [pointwise(source, middle), depthwise(middle, stride), pointwise(middle, grown)]
        self.main = nn.Sequential(*parts)
        self.shortcut = None if stride == 1 else nn.Sequential(depthwise(source, stride), pointwise(source, source))

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is None:
            # Splitting into even and odd channels includes the channel shuffle of the previous layer.
            passed, x = x.unflatten(1, (-1, 2)).unbind(2)
            return torch.cat((passed, self.main(x)), 1)
        return torch.cat((self.shortcut(x), self.main(x)), 1)


def make_block(op: str, layer: Layer, activation: str) -> nn.Module:
    """Return the module of an op in a layer."""
    kind, shape = parse_op(op), (layer.in_channels, layer.out_channels)
    if layer.block is not None and not layer.is_nothing(op):
        return make_base_block(op, layer)
    if kind.family == "PX":
        return Resize(kind.pixels)
    if kind.family == CUSTOM:
        return _custom_block(op, layer)
    if is_nothing(op, *shape, layer.stride):
        return nn.Identity()
    if kind.family == "ID":
        return ConvNorm(*shape, stride=layer.stride)
    if kind.family == "CONV":
        return ConvNorm(*shape, kind.kernel, layer.stride, activation="relu")
    if kind.family == "MB":
        return MBConv(*shape, layer.stride, kind.expansion, kind.kernel, kind.se, activation)
    return ShuffleUnit(*shape, layer.stride, kind.kernel, kind.family == "XCEPTION", activation)


def _custom_block(op: str, layer: Layer) -> nn.Module:
    """Return the module of a registered op. It keeps its constructor, with which `initialise` builds it again."""
    found = custom_op(op)
    assert found is not None  # the name has been parsed
    build = partial(found.build, layer.in_channels, layer.out_channels, layer.stride)
    block: nn.Module = build()
    block.__dict__["build_anew"] = build
    return block


@torch.no_grad()
def initialise(net: nn.Module, generator: torch.Generator | None = None) -> None:
    """Initialise all weights of a network from one generator.

    Convolutions are He normal by fan-out, the classifier is N(0, 0.01). Registered ops keep their own initialisation.
    """
    own: set[nn.Module] = set()
    for module in net.modules():
        if "build_anew" in module.__dict__:
            own.update(module.modules())
            _initialise_itself(module, generator)
        if module in own:
            continue
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1] // module.groups
            module.weight.normal_(0, (2 / fan_out) ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.01, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()  # also the running statistics


def _initialise_itself(block: nn.Module, generator: torch.Generator | None) -> None:
    """Initialise a registered op by building it again. It draws from the global generator, seeded here from ours."""
    with torch.random.fork_rng(devices=[]):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        with torch.device("cpu"):
            block.load_state_dict(block.__dict__["build_anew"]().state_dict())


@torch.no_grad()
def start_as_identities(net: nn.Module) -> None:
    """Make every residual block start as an identity: set the weight of its last BatchNorm to zero."""
    for module in net.modules():
        if isinstance(module, MBConv | Bottleneck) and module.residual:
            nn.init.zeros_(module.project.norm.weight)  # type: ignore[arg-type]
