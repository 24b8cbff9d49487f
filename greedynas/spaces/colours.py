"""The colours of ops, in drawings and tables."""

from greedynas.spaces.ops import CUSTOM, Op, parse_op

# Hue by kernel, strength by expansion, a bar at the right edge for SE. Readable with the common colour blindnesses.
KERNEL_COLOURS = {1: "#b8bec6", 3: "#3b82c4", 5: "#e8912d", 7: "#3d9970"}
OTHER_COLOUR = "#9b6fb0"
SE_COLOUR = "#c0392b"


def op_colour(name: str) -> str:
    """Return the fill colour of an op: the hue of its kernel, lighter for small expansions."""
    op = parse_op(name)
    if op.family == CUSTOM:
        return OTHER_COLOUR
    if op.family == "ID" or op.kernel == 1:
        return KERNEL_COLOURS[1]
    hue = OTHER_COLOUR if op.family == "XCEPTION" else KERNEL_COLOURS.get(op.kernel, OTHER_COLOUR)
    return hue if is_dark(op) else _lighter(hue)


def is_dark(op: Op) -> bool:
    """Return whether the colour of an op is dark enough for white letters: that of a kernel of 1 is grey."""
    return op.family == CUSTOM or (op.family != "ID" and op.kernel > 1 and (op.family != "MB" or op.expansion >= 4))


def _lighter(colour: str) -> str:
    """Return the colour half way to white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))
