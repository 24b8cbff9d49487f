"""The colours of ops, in drawings and tables."""

from greedynas.spaces.ops import CUSTOM, Op, parse_op

# The hue shows the kernel, its strength the expansion, a bar at the right edge SE. Readable with common colour
# blindnesses.
KERNEL_COLOURS = {1: "#b8bec6", 3: "#3b82c4", 5: "#e8912d", 7: "#3d9970"}
OTHER_COLOUR = "#9b6fb0"
SE_COLOUR = "#c0392b"


def op_colour(name: str) -> str:
    """Return the fill colour of an op: the hue of its kernel size, lighter for small expansions."""
    op = parse_op(name)
    if op.family == CUSTOM:
        return OTHER_COLOUR
    if op.family == "ID" or op.kernel == 1:
        return KERNEL_COLOURS[1]
    hue = OTHER_COLOUR if op.family == "XCEPTION" else KERNEL_COLOURS.get(op.kernel, OTHER_COLOUR)
    return hue if is_dark(op) else _lighter(hue)


def is_dark(op: Op) -> bool:
    """Return whether the colour of an op is dark enough for white letters; the grey of kernel size 1 is not."""
    return op.family == CUSTOM or (op.family != "ID" and op.kernel > 1 and (op.family != "MB" or op.expansion >= 4))


def _lighter(colour: str) -> str:
    """Return the colour halfway between this one and white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
