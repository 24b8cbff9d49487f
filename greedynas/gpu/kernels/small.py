# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels for small images, where the number of kernels matters: the crops of a whole batch, the means over
pixels, the scores of a path, and the update of a block's parameters are one kernel each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from greedynas.gpu.kernels.launching import alignment, cdiv, launch, power_of_two
from greedynas.gpu.kernels.norms import activate, affine_row

CHUNK = 2048  # parameters that one program updates
FIELDS = 6  # of a row of the update's table: four addresses, the first element and the number of elements


@triton.jit(do_not_specialize=["stored", "size", "channels"])
def _crops(
    pixels_ptr, rows_ptr, plan_ptr, scale_ptr, shift_ptr, out_ptr, stored, size, channels, BLOCK: tl.constexpr
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = i % channels
    x = i // channels % size
    y = i // (channels * size)
    x = tl.where(tl.load(plan_ptr + image * 3 + 2) > 0, size - 1 - x, x) + tl.load(plan_ptr + image * 3 + 1)
    y += tl.load(plan_ptr + image * 3)
    whole = size * size * channels
    inside = (i < whole) & (x >= 0) & (x < stored) & (y >= 0) & (y < stored)
    at = ((tl.load(rows_ptr + image) * stored + y) * stored + x) * channels + c
    value = tl.load(pixels_ptr + at, mask=inside, other=0).to(tl.float32)
    value = value * tl.load(scale_ptr + c) + tl.load(shift_ptr + c)
    tl.store(out_ptr + image * whole + i, value, mask=i < whole)


@triton.jit(do_not_specialize=["pixels", "CA"])
def _image_means(x_ptr, norm_ptr, out_ptr, pixels, CA, ALIGN: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the mean over pixels of each image; a thread owns channels of an image and loads 16 pixels at a time."""
    C = CA * ALIGN
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    scale = affine_row(norm_ptr, 2, C, c, inside)
    shift = affine_row(norm_ptr, 3, C, c, inside)
    image = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, pixels, 16):
        for i in tl.static_range(16):
            here = c < tl.where(start + i < pixels, C, 0)
            x = tl.load(x_ptr + (image * pixels + start + i) * C + c, mask=here, other=0.0).to(tl.float32)
            total += tl.where(here, activate(x * scale + shift, ACT), 0.0)
    tl.store(out_ptr + image * C + c, total / pixels, mask=inside)


@triton.jit(do_not_specialize=["images", "features", "classes"])
def _scores(
    x_ptr, w_ptr, b_ptr, labels_ptr, loss_ptr, right_ptr, images, features, classes,
    HALF: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    c = tl.arange(0, BLOCK_C)
    logits = tl.zeros((BLOCK_I, BLOCK_C), tl.float32)
    for start in range(0, features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + i[:, None] * features + k[None, :], mask=(i < images)[:, None] & (k < features)[None, :], other=0.0)  # fmt: skip
        w = tl.load(w_ptr + c[None, :] * features + k[:, None], mask=(c < classes)[None, :] & (k < features)[:, None], other=0.0)  # fmt: skip
        if HALF:
            logits = tl.dot(x.to(tl.bfloat16), w.to(tl.bfloat16), logits)
        else:
            logits = tl.dot(x, w, logits, input_precision="ieee")
    logits += tl.load(b_ptr + c, mask=c < classes, other=float("-inf"))[None, :]
    labels = tl.load(labels_ptr + i, mask=i < images, other=0)
    top = tl.max(logits, 1)
    chosen = tl.sum(tl.where(c[None, :] == labels[:, None], logits, 0.0), 1)
    loss = tl.log(tl.sum(tl.exp(logits - top[:, None]), 1)) + top - chosen
    first = tl.min(tl.where(logits == top[:, None], c[None, :], BLOCK_C), 1)
    tl.store(right_ptr + i, (first == labels).to(tl.int8), mask=i < images)
    tl.store(loss_ptr + tl.program_id(0), tl.sum(tl.where(i < images, loss, 0.0), 0))


@triton.jit(do_not_specialize=["momentum"])
def _sgd(table_ptr, decay_ptr, lr_ptr, momentum, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    row = table_ptr + tl.program_id(0) * FIELDS
    i = tl.load(row + 4) + tl.arange(0, BLOCK)
    inside = i < tl.load(row + 5)
    parameter = tl.load(row).to(tl.pointer_type(tl.float32)) + i
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + i
    velocity = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + i
    p = tl.load(parameter, mask=inside, other=0.0)
    g = tl.load(gradient, mask=inside, other=0.0) + tl.load(decay_ptr + tl.program_id(0)) * p
    v = momentum * tl.load(velocity, mask=inside, other=0.0) + g
    p -= tl.load(lr_ptr) * (g + momentum * v)
    tl.store(velocity, v, mask=inside)
    tl.store(parameter, p, mask=inside)
    cast = tl.load(row + 3)
    if cast != 0:
        tl.store(cast.to(tl.pointer_type(tl.bfloat16)) + i, p.to(tl.bfloat16), mask=inside)


def crops(pixels: Tensor, rows: Tensor, plan: Tensor, size: int, scale: Tensor, shift: Tensor) -> Tensor:
    """Return uint8 squares, cropped and flipped by a plan (top, left, flip), 0 outside, normalised: float32 NHWC."""
    stored, channels = pixels.shape[2:]
    out = torch.empty((len(rows), size, size, channels), dtype=torch.float32, device=pixels.device)
    grid = (len(rows), cdiv(out[0].numel(), 1024))
    launch(_crops, grid, pixels, rows, plan, scale, shift, out, stored, size, channels, 1024)
    return out


def image_means(x: Tensor, norm: Tensor, act: str | None) -> Tensor:
    """Return the mean over pixels of act(BatchNorm(x)) for x (images, H, W, C): float32 (images, C)."""
    images, pixels, C = len(x), x.shape[1] * x.shape[2], x.shape[3]
    out, align = torch.empty((images, C), dtype=torch.float32, device=x.device), alignment(C)
    launch(_image_means, (images, cdiv(C, 256)), x, norm, out, pixels, C // align, align, act, 256)
    return out


def scores(
    features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, losses: Tensor, right: Tensor, half: bool
) -> None:
    """Compute the scores of a linear classifier, with its product in bf16 if `half`.

    Stores the sums of the cross-entropies of every 16 images in `losses`, and in `right` (int8) which images are right.
    """
    images, wide = features.shape
    few = len(weight) <= 64  # the tile of the weights must fit into shared memory
    launch(
        _scores, (len(losses),), features, weight, bias, labels, losses, right, images, wide, len(weight),
        half, 16, power_of_two(len(weight)), 128 if few else 16, num_warps=4 if few else 8, num_stages=3 if few else 1,
    )  # fmt: skip


@dataclass
class Update:
    """SGD with Nesterov momentum for several parameters in one kernel, which gets a table of addresses."""

    parameters: Sequence[Tensor]
    velocities: Sequence[Tensor]
    decays: Sequence[float]
    casts: Sequence[Tensor | None]  # bf16 copies to update as well
    momentum: float
    lr: Tensor
    gradients: Sequence[Tensor] = ()
    table: Tensor = field(init=False)
    decay: Tensor = field(init=False)

    def __post_init__(self) -> None:
        chunks = [cdiv(p.numel(), CHUNK) for p in self.parameters]
        each = [decay for decay, count in zip(self.decays, chunks, strict=True) for _ in range(count)]
        self.table = torch.zeros((sum(chunks), FIELDS), dtype=torch.int64, device=self.lr.device)
        self.decay = torch.tensor(each, dtype=torch.float32, device=self.lr.device)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        self.gradients = gradients
        if len(self.table):
            launch(_sgd, (len(self.table),), self.table, self.decay, self.lr, self.momentum, FIELDS, CHUNK)

    def begin(self) -> None:
        """Fill the table: from now on, a replay of the last call updates the parameters; before, it changes nothing.

        The gradients must have the layout of their parameters.
        """
        rows, gradients = [], self.gradients
        self.gradients = ()
        for p, g, v, cast in zip(self.parameters, gradients, self.velocities, self.casts, strict=True):
            if g.stride() != p.stride() or v.stride() != p.stride() or g.dtype != torch.float32:
                raise ValueError("a gradient must be float32 and have the layout of its parameter")
            address = (p.data_ptr(), g.data_ptr(), v.data_ptr(), 0 if cast is None else cast.data_ptr())
            rows += [(*address, first, p.numel()) for first in range(0, p.numel(), CHUNK)]
        self.table.copy_(torch.tensor(rows, dtype=torch.int64).reshape(-1, FIELDS))
