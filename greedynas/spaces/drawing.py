"""Drawings of architectures as SVG: one box per block, in colours as in the last figure of the paper's supplement."""

from collections.abc import Sequence
from html import escape

from greedynas.spaces.colours import SE_COLOUR, is_dark, op_colour
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import op_names
from greedynas.spaces.space import Layer, Space

ROW, GAP, LEFT, WIDTH = 22, 6, 90, 200  # pixels

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
  .note { fill: #667079; font-size: 11px } .stage { stroke: #c9ced4 } .on { fill: #fff } .off { fill: #1b1f24 }
  @media (prefers-color-scheme: dark) { text { fill: #e6e8eb } .note { fill: #9aa4ae } .stage { stroke: #454c54 } .on { fill: #fff } .off { fill: #1b1f24 } }
"""


class Drawing(str):
    """The text of an SVG, which notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw_path(path: Sequence[int], space: Space, title: str = "") -> Drawing:
    """Draw a network from stem to classifier, top to bottom, with the shape after each block.

    Args:
        path: The path.
        space: Its space.
        title: A heading instead of the space's name.

    Returns:
        The drawing as SVG: text for a file, and a picture in a notebook.

    Example:
        >>> import greedynas
        >>> greedynas.draw_path((2, 2, 2, 1, 2, 2, 0, 2), greedynas.load_space("macro"))[:4]
        '<svg'
    """
    label = title or f"a network of {space.name}"
    space, path = space.settle(path)  # at the image size that the path chooses
    stem, head = space.stem_layers, (*space.head_layers, *space.neck_layers)
    names = [layer.ops[0] for layer in stem] + op_names(path, space) + [layer.ops[0] for layer in head]
    layers: list[Layer] = [*stem, *space.layers, *head]
    parts: list[str] = []
    top = 40
    parts.append(_text(LEFT, top - 8, f"image {space.image_size}×{space.image_size}×{space.image_channels}", "note"))
    previous = ""
    for name, layer in zip(names, layers, strict=True):
        if layer.where != previous:
            parts.append(
                f'<line class="stage" x1="8" x2="{LEFT + WIDTH + 110}" y1="{top - GAP / 2}" y2="{top - GAP / 2}"/>'
            )
            parts.append(_text(8, top + 15, layer.where, "note"))
            previous = layer.where
        parts.append(_box(name, layer, top))
        stride = f", /{layer.stride}" if layer.stride > 1 else ""
        parts.append(_text(LEFT + WIDTH + 8, top + 15, f"{layer.out_size}²×{layer.out_channels}{stride}", "note"))
        top += ROW + GAP
    parts.append(f'<line class="stage" x1="8" x2="{LEFT + WIDTH + 110}" y1="{top - GAP / 2}" y2="{top - GAP / 2}"/>')
    pooled = "FC" if space.neck_layers else "pool, FC"  # the neck stands behind the pooling
    parts.append(_text(LEFT, top + 15, f"{pooled} {space.features} → {space.num_classes}", "note"))
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {LEFT + WIDTH + 120} {top + 28}" '
        f'width="{LEFT + WIDTH + 120}" height="{top + 28}">\n<title>{escape(label)}</title>\n<style>{STYLE}</style>\n'
        + _text(8, 16, label, "")
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _box(name: str, layer: Layer, top: int) -> str:
    op = parse_op(name)
    hover = f"<title>{escape(f'{name}: {layer.in_size}²×{layer.in_channels} to {layer.out_size}²×{layer.out_channels}')}</title>"
    if layer.is_nothing(name):
        middle = top + ROW / 2
        line = f'<line class="stage" x1="{LEFT + WIDTH / 2}" x2="{LEFT + WIDTH / 2}" y1="{top}" y2="{top + ROW}" stroke-dasharray="3 3"/>'
        return f"<g>{hover}{line}{_text(LEFT + WIDTH / 2 + 8, middle + 4, name, 'note')}</g>"
    width = WIDTH * (0.55 + 0.45 * min(op.expansion, 6) / 6) if op.family == "MB" else WIDTH * 0.7
    left = LEFT + (WIDTH - width) / 2
    box = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" rx="4" fill="{op_colour(name)}"/>'
    if op.se:
        box += f'<rect x="{left + width - 7:.1f}" y="{top}" width="7" height="{ROW}" rx="2" fill="{SE_COLOUR}"/>'
    middle = LEFT + WIDTH / 2
    return f"<g>{hover}{box}{_text(middle, top + 15, name, 'on' if is_dark(op) else 'off', 'middle')}</g>"


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
