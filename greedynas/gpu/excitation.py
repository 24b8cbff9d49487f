"""Squeeze-and-excitation in an MBConv block of the engine. The gate's two small layers run in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn

from greedynas.gpu.kernels import gating, pointwise


def excite(se: Any, squeezed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gate (images, C) in float32, and the tensors that its gradient needs."""
    with torch.autocast(squeezed.device.type, enabled=False):
        hidden = nn.functional.linear(squeezed, se.reduce.weight.flatten(1), se.reduce.bias)
        logits = nn.functional.linear(nn.functional.hardswish(hidden), se.expand.weight.flatten(1), se.expand.bias)
        return nn.functional.hardsigmoid(logits), hidden, logits


def _excite_gradient(grad: Tensor, saved: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of the squeezed activations and of the four parameters of SqueezeExcite."""
    w_reduce, w_excite, hidden = saved["w_reduce"], saved["w_excite"], saved["hidden"]
    with torch.autocast(grad.device.type, enabled=False):
        logits = torch.ops.aten.hardsigmoid_backward(grad, saved["logits"])
        inner = torch.ops.aten.hardswish_backward(logits @ w_excite.flatten(1), hidden)
        return (
            inner @ w_reduce.flatten(1),
            _like(inner.t() @ saved["squeezed"], w_reduce),
            inner.sum(0),
            _like(logits.t() @ nn.functional.hardswish(hidden), w_excite),
            logits.sum(0),
        )


def _like(grad: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient in the memory layout of its weight, so that autograd and the optimizer need not copy it."""
    return grad.as_strided(weight.shape, weight.stride())


def gated_gradients(g: Tensor, coef: Tensor, saved: dict[str, Tensor], act: str | None) -> tuple[Any, ...]:
    """Backpropagate from the last BatchNorm through squeeze-and-excitation to the z of the BatchNorm before.

    Returns the gradient of z, its partial sums, the gradient of the last convolution, and the gradients of the four
    parameters of SqueezeExcite.
    """
    b, d, norm, gate = saved["b"], saved["d"], saved["norm_b"], saved["gate"]
    project = pointwise.weight_gradient(g, d, coef, b, norm, act, gate, like=saved["project"])
    gb, _ = pointwise.input_gradient(g, d, coef, saved["w_project"])
    squeeze_grad, *se = _excite_gradient(gating.image_sums(b, norm, act, len(b), gb), saved)
    part = gating.gate_gradient(gb, gate, squeeze_grad / (b.shape[1] * b.shape[2]), b, norm, act)
    return gb, part, project, *se
