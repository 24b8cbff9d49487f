"""Spaces around a pretrained network: each block as it is, and smaller versions of it."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from greedynas.spaces.base_block import op_name
from greedynas.spaces.space import Space, Stage

ROUNDED_TO = 8  # channels
SMALLEST_KERNEL = 3
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Elastic(BaseModel):
    """How the blocks of a pretrained network may shrink.

    Attributes:
        widths: Shares of the hidden channels of a block, from 0 to 1. The whole block is always there.
        kernels: Whether smaller kernels may replace the block's own.
        without_se: Whether squeeze-and-excitation may be left out.
        skip: Whether a block with a residual may be left out.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    widths: Annotated[tuple[Share, ...], Field(min_length=1, max_length=16)] = (1.0, 0.6667, 0.5, 0.3333)
    kernels: bool = True
    without_se: bool = True
    skip: bool = True


def elastic_ops(stage: Stage, in_channels: int, elastic: Elastic) -> tuple[str, ...]:
    """Return the names of a block's own op and of its smaller versions, the whole block last and the identity first."""
    block = stage.block
    assert block is not None
    assert block.hidden is not None
    widths = {block.hidden}
    if block.expands:
        shares = (ROUNDED_TO * round(share * block.hidden / ROUNDED_TO) for share in elastic.widths)
        widths |= {width for width in shares if ROUNDED_TO <= width <= block.hidden}
    least = min(SMALLEST_KERNEL, block.kernel) if elastic.kernels else block.kernel
    kernels = range(least, block.kernel + 1, 2)
    gates = [True, False] if block.squeeze and elastic.without_se else [bool(block.squeeze)]
    names = [op_name(width, in_channels, k, se) for width in sorted(widths) for k in kernels for se in sorted(gates)]
    return (*(("ID",) if block.residual and elastic.skip else ()), *names)


def space_around(
    base: Space, elastic: Elastic | None = None, sizes: Sequence[int] = (), name: str | None = None
) -> Space:
    """Return the space of a pretrained network and of all smaller versions of it.

    Args:
        base: The network itself, as a space with one path.
        elastic: How its blocks may shrink.
        sizes: The image sizes to choose from; none: the base's own.
        name: The name of the space.

    Returns:
        The space. Its path with the highest index in every layer is the whole network.
    """
    elastic = elastic or Elastic()
    channels = base.stem_layers[-1].out_channels
    stages = []
    for stage in base.stages:
        stages.append(stage.model_copy(update={"ops": elastic_ops(stage, channels, elastic)}))
        channels = stage.channels
    ops = tuple(dict.fromkeys(op for stage in stages for op in stage.ops or ()))
    changes: dict[str, Any] = {"name": name or f"around {base.base}", "ops": ops, "stages": stages}
    if sizes:
        changes |= {"sizes": tuple(sorted(set(sizes))), "image_size": max(sizes)}
    return Space.model_validate({**base.model_dump(), **changes, "stages": [stage.model_dump() for stage in stages]})
