"""Compare every Triton kernel with float64 PyTorch.

`test_kernels.py` runs this file in Triton's interpreter, on the CPU and in float32. On a machine with a GPU,
`python -m pytest tests/helpers/interpreted_kernels.py` runs the compiled kernels in bf16.
"""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from greedynas.gpu.kernels import (  # noqa: E402
    depthwise,
    depthwise_backward,
    gating,
    norms,
    pointwise,
    pointwise_backward,
    stem,
    weights,
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
ROUNDING = 1e-6 if INTERPRETED else 1e-2
ACTS = {"relu": F.relu, "hard_swish": F.hardswish, None: lambda z: z}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def random(*shape, dtype=DTYPE):
    return torch.randn(shape, device=DEVICE).to(dtype)


def vectors(rows, channels):
    """Return a random `norm` or `coef` with a positive second row (1 / standard deviation)."""
    made = random(rows, channels, dtype=torch.float32)
    made[1] = made[1].abs() + 0.5
    return made


def close(value, reference, factor=1.0):
    error = ((value.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()
    assert error < factor * ROUNDING, error


def z_of(x, norm):
    return x.double() * norm[norms.SCALE].double() + norm[norms.SHIFT].double()


def check_moments(part, values):
    """Return the mean and variance of a matrix, pooled by hand."""
    count, mean, square = part[4:].double().view(3, -1, part.shape[1])
    assert (count.sum(0) == len(values)).all()
    pooled = (count * mean).sum(0) / len(values)
    close(pooled, values.mean(0), 3)
    close((square + count * (mean - pooled) ** 2).sum(0) / len(values), values.var(0, correction=0), 3)


def check_sums(part, values, factor=1.0):
    """Return the partial sums of a matrix (values[0]) and of its product with another one (values[1])."""
    first, second = part[3:].double().view(2, -1, part.shape[1])
    close(first.sum(0), values[0].sum(0), factor)
    close(second.sum(0), values[1].sum(0), factor)


@pytest.mark.parametrize(
    ("images", "height", "width", "channels", "kernel", "stride", "act"),
    [
        (2, 5, 6, 3, 3, 1, "relu"),
        (3, 3, 5, 16, 3, 2, "hard_swish"),
        (2, 6, 4, 10, 5, 1, "hard_swish"),
        (1, 5, 9, 6, 5, 2, "relu"),
        (1, 8, 7, 8, 7, 1, "relu"),
        (2, 3, 7, 8, 5, 1, "relu"),  # a plan of seven columns
        (1, 4, 14, 16, 3, 1, "hard_swish"),
        (2, 4, 5, 12, 7, 2, "hard_swish"),
        (1, 1, 2, 4, 7, 1, "relu"),  # fewer rows than the filter has
        (3, 5, 4, 5, 3, 1, None),  # no BatchNorm before it
    ],
)
def test_depthwise(images, height, width, channels, kernel, stride, act):
    x, w = random(images, height, width, channels), random(channels, 1, kernel, kernel, dtype=torch.float32)
    before = None if act is None else vectors(4, channels)
    y, part = depthwise.forward(x, w, stride, before, act)

    z = (x.double() if before is None else z_of(x, before)).requires_grad_()
    filters = w.double().requires_grad_()
    wanted = F.conv2d(ACTS[act](z).permute(0, 3, 1, 2), filters, None, stride, kernel // 2, groups=channels)
    wanted = wanted.permute(0, 2, 3, 1)
    close(y, wanted)
    check_moments(part, wanted.detach().reshape(-1, channels))

    g, coef = random(*y.shape), vectors(3, channels)
    wanted.backward(coef[0].double() * g + coef[1].double() * y + coef[2])
    z_grad, part, w_grad = depthwise_backward.backward(g, y, coef, x, w, stride, before, act)
    close(z_grad, z.grad)
    close(w_grad, filters.grad)
    assert w_grad.shape == w.shape
    if before is not None:
        check_sums(part, (z.grad.reshape(-1, channels), (z.grad * (x.double() - before[0])).reshape(-1, channels)))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "act", "images"),
    [
        (200, 16, 40, None, 0),
        (130, 40, 24, "relu", 0),
        (150, 70, 33, "hard_swish", 3),
        (64, 7, 5, "relu", 2),
        (257, 130, 70, None, 0),
        (70, 34, 100, None, 0),
        (70, 20, 132, "relu", 0),
    ],
)
def test_pointwise(rows, inputs, outputs, act, images):
    x, w = random(rows, inputs), random(outputs, inputs)
    before = None if act is None else vectors(4, inputs)
    gate = torch.rand(images, inputs, device=DEVICE).to(DTYPE) if images else None
    y, part = pointwise.forward(x, w, before, act, gate)

    seen = x.double() if before is None else ACTS[act](z_of(x, before))
    seen = seen if gate is None else seen * gate.double().repeat_interleave(rows // images, 0)
    wanted = seen @ w.double().t()
    close(y, wanted)
    check_moments(part, wanted)

    g, coef = random(rows, outputs), vectors(3, outputs)
    y_grad = coef[0].double() * g + coef[1].double() * y + coef[2]
    close(pointwise.weight_gradient(g, y, coef, x, before, act, gate), y_grad.t() @ seen)
    x_grad = y_grad @ w.double()
    close(pointwise.input_gradient(g, y, coef, w)[0], x_grad)
    close(pointwise.input_gradient(g, y, coef, w, add=x)[0], x_grad + x)
    if before is None:
        both = pointwise_backward.widening(g, y, coef, w, w, x, add=x)
        close(both[0], x_grad + x)
        close(both[1], y_grad.t() @ seen)
    else:
        z = z_of(x, before).requires_grad_()
        ACTS[act](z).backward(x_grad)
        z_grad, part = pointwise.input_gradient(g, y, coef, w, x=x, before=before, act=act)
        close(z_grad, z.grad)
        check_sums(part, (z.grad, z.grad * (x.double() - before[0])))
        z_again, part, w_grad = pointwise_backward.narrowing(g, y, coef, w, w, x, before, act)
        close(z_again, z.grad)
        check_sums(part, (z.grad, z.grad * (x.double() - before[0])))
        close(w_grad, y_grad.t() @ ACTS[act](z_of(x, before)))


@pytest.mark.parametrize(
    ("images", "height", "width", "channels", "outputs", "kernel", "stride", "layout"),
    [
        (2, 9, 12, 3, 8, 3, 2, torch.channels_last),
        (3, 6, 5, 1, 5, 3, 1, torch.contiguous_format),
        (1, 7, 7, 2, 20, 5, 2, torch.contiguous_format),
    ],
)
@pytest.mark.parametrize("act", ["relu", "hard_swish"])
def test_stem(images, height, width, channels, outputs, kernel, stride, layout, act):
    x = random(images, height, width, channels, dtype=torch.float32)
    w = random(outputs, channels, kernel, kernel, dtype=torch.float32).to(memory_format=layout)
    filters = w.double().requires_grad_()
    wanted = F.conv2d(x.double().permute(0, 3, 1, 2), filters, None, stride, kernel // 2).permute(0, 2, 3, 1)
    y, part = stem.forward(x, w, stride, DTYPE)
    close(y, wanted)
    check_moments(part, wanted.detach().reshape(-1, outputs))

    g, norm, coef = random(*y.shape), vectors(4, outputs), vectors(3, outputs)
    z = z_of(y, norm).requires_grad_()
    ACTS[act](z).backward(g.double())
    wanted.backward(coef[0].double() * z.grad + coef[1].double() * y + coef[2])
    made = stem.weight_gradient(x, g, y, norm, coef, act, w, stride)
    close(made, filters.grad)
    assert made.stride() == w.stride()


def test_cast():
    a, b = random(40, 70, dtype=torch.float32), random(3, 5, dtype=torch.float32)
    for made, weight in zip(weights.cast(a, b, torch.float16), (a, b), strict=True):
        assert made.dtype is torch.float16
        close(made, weight.double(), 1e3 if INTERPRETED else 1)


@pytest.mark.parametrize(("rows", "channels"), [(70, 3), (33, 24), (40, 130)])
@pytest.mark.parametrize("act", ["relu", "hard_swish", None])
def test_batch_norm(rows, channels, act):
    """Compare statistics, running statistics, output and all gradients with nn.BatchNorm2d."""
    plain = nn.BatchNorm2d(channels, device=DEVICE)
    nn.init.normal_(plain.running_mean)
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    ours = nn.BatchNorm2d(channels, device=DEVICE)
    ours.load_state_dict(plain.state_dict())
    plain.double()
    y, residual = random(rows, channels) + 3, random(rows, channels)
    yd = y.double().requires_grad_()
    wanted = ACTS[act](plain(yd[:, :, None, None])[:, :, 0, 0])

    norm = norms.finish_norm(ours, norms.statistics(y))
    close(norms.normalise(y, norm, act=act), wanted)
    close(norms.normalise(y, norm, residual), z_of(y, norm) + residual)
    close(ours.running_mean, plain.running_mean)
    close(ours.running_var, plain.running_var)
    assert ours.num_batches_tracked == 1

    g = random(rows, channels)
    wanted.backward(g.double())
    coef, weight, bias = norms.finish_gradient(norm, norms.gradient_sums(g, y, norm, act), rows, True)
    close(norms.gradient_apply(g, y, norm, coef, act), yd.grad, 5)
    close(weight, plain.weight.grad, 5)
    close(bias, plain.bias.grad, 5)


def test_statistics_of_values_far_from_zero():
    """Compute a variance that sums of plain squares would lose to rounding."""
    norm = nn.BatchNorm2d(4, device=DEVICE)
    y = (torch.randn(500, 4, device=DEVICE, dtype=torch.float64) + 10000).to(torch.float32)
    made = norms.finish_norm(norm, norms.statistics(y))
    wanted = 1 / (y.double().var(0, correction=0) + norm.eps).sqrt()
    assert ((made[norms.INVERSE] - wanted).abs() / wanted).max() < 1e-4


@pytest.mark.parametrize(("images", "pixels", "channels"), [(3, 5, 10), (2, 40, 70)])
@pytest.mark.parametrize("act", ["relu", "hard_swish"])
def test_squeeze_and_excite(images, pixels, channels, act):
    x, norm = random(images * pixels, channels), vectors(4, channels)
    c = ACTS[act](z_of(x, norm)).view(images, pixels, channels)
    g = random(images * pixels, channels)
    close(gating.image_sums(x, norm, act, images), c.sum(1))
    close(gating.image_sums(x, norm, act, images, g), (c * g.double().view_as(c)).sum(1), 5)

    gate, squeeze = torch.rand(images, channels, device=DEVICE).to(DTYPE), random(images, channels, dtype=torch.float32)
    z = z_of(x, norm).requires_grad_()
    out = g.double().view_as(c) * gate.double()[:, None] + squeeze.double()[:, None]
    ACTS[act](z).backward(out.view_as(z))
    part = gating.gate_gradient(g, gate, squeeze, x, norm, act)
    close(g, z.grad)
    check_sums(part, (z.grad, z.grad * (x.double() - norm[0])), 5)
