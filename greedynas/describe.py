"""What is in a space, and what a network costs layer by layer: as plain data for `--json` and as rich tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from greedynas.drawing import op_colour
from greedynas.known import known_networks
from greedynas.ops import linear_cost
from greedynas.paths import canonical, compact, op_names
from greedynas.space import Layer, Space, load_space, space_names

SAMPLES = 100_000
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
BAR = 40


def space_facts(space: Space) -> dict[str, Any]:
    """A space: its layers, its size, the range of its costs and their distribution over uniformly drawn paths."""
    paths = space.sample(SAMPLES, np.random.default_rng(0))
    costs = space.costs(paths)
    params = space.cost_tables["params"]
    return {
        "space": space.name,
        "image_size": space.image_size,
        "image_channels": space.image_channels,
        "num_classes": space.num_classes,
        "activation": space.activation,
        "paths": space.size,
        "supernet_params": int(params.fixed + sum(params.cells(layer).sum() for layer in range(len(space.layers)))),
        "layers": [_layer_facts(layer) | {"ops": list(layer.ops)} for layer in space.layers],
        "macs": _distribution(costs.macs, space.cost_tables["macs"].range),
        "params": _distribution(costs.params, space.cost_tables["params"].range),
        "sampled_paths": SAMPLES,
    }


def path_facts(path: Sequence[int], space: Space) -> dict[str, Any]:
    """A path: every layer with its shapes and costs, and the sums."""
    costs = space.costs([path])
    names = op_names(path, space)
    rows = [(layer, layer.ops[0]) for layer in space.stem_layers]
    rows += list(zip(space.layers, names, strict=True))
    rows += [(layer, layer.ops[0]) for layer in space.head_layers]
    layers = [_layer_facts(layer) | {"op": op} | layer.cost(op)._asdict() for layer, op in rows]
    classifier = linear_cost(space.features, space.num_classes)
    layers.append(
        {"where": "classifier", "op": f"FC {space.num_classes}", "in_channels": space.features} | classifier._asdict()
    )
    return {
        "space": space.name,
        "name": next(
            (
                name
                for name, known in known_networks().items()
                if (known.space, known.path) == (space.name, tuple(path))
            ),
            None,
        ),
        "path": list(path),
        "canonical_path": list(canonical(path, space)),
        "compact": compact(path, space),
        "ops": names,
        "macs": int(costs.macs[0]),
        "params": int(costs.params[0]),
        "image_size": space.image_size,
        "num_classes": space.num_classes,
        "layers": layers,
    }


def show_catalogue(console: Console) -> None:
    """Everything that has a name."""
    spaces = Table(title="Spaces", title_justify="left")
    for column in ("name", "layers", "paths", "image", "MACs", "parameters"):
        spaces.add_column(column, justify="left" if column == "name" else "right")
    for name in space_names():
        space = load_space(name)
        ranges = [" – ".join(_short(end) for end in space.cost_tables[cost].range) for cost in ("macs", "params")]
        spaces.add_row(name, str(len(space.layers)), f"{space.size:.3g}", f"{space.image_size} px", *ranges)
    networks = Table(title="Known networks", title_justify="left")
    for column in ("name", "space", "MACs", "parameters"):
        networks.add_column(column, justify="left" if column in ("name", "space") else "right")
    for known in known_networks().values():
        costs = load_space(known.space).costs([known.path])
        networks.add_row(known.name, known.space, f"{costs.macs[0]:,}", f"{costs.params[0]:,}")
    console.print(spaces, networks)
    console.print(
        "Next: [bold]greedynas describe --space mobilenet[/] or [bold]greedynas describe --path greedynas-a[/]"
    )


def catalogue_facts() -> dict[str, Any]:
    known = {name: {"space": network.space, "path": list(network.path)} for name, network in known_networks().items()}
    return {"spaces": space_names(), "known_networks": known}


def show_space(space: Space, console: Console) -> None:
    facts = space_facts(space)
    table = Table(title=Text(f"Space {space.name}"), title_justify="left")
    for column in ("layers", "width", "stride", "input", "ops"):
        table.add_column(column, justify="left" if column == "ops" else "right")
    first = 0
    for stage in space.stages:
        layer = space.layers[first]
        numbers = f"{first}" if stage.repeat == 1 else f"{first} – {first + stage.repeat - 1}"
        shape = f"{layer.in_size}²×{layer.in_channels}"
        same = first > 0 and layer.ops == space.layers[first - 1].ops
        ops = Text("as above", "dim") if same else Text(" ").join(_op(op) for op in layer.ops)
        table.add_row(numbers, str(stage.channels), str(stage.stride), shape, ops)
        first += stage.repeat
    console.print(table)
    console.print(
        f"{facts['paths']:,} paths; the supernet has {facts['supernet_params']:,} parameters; "
        f"{space.image_size} px, {space.num_classes} classes",
        highlight=False,
    )
    costs = Table(title=f"Costs over {SAMPLES:,} random paths", title_justify="left")
    costs.add_column("")
    for quantile in QUANTILES:
        costs.add_column({0: "cheapest", 50: "median", 100: "dearest"}.get(quantile, f"{quantile}%"), justify="right")
    for label, cost in (("MACs", "macs"), ("parameters", "params")):
        costs.add_row(label, *(_short(value) for value in facts[cost]["quantiles"].values()))
    console.print(costs)
    console.print(_histogram(facts["macs"]["histogram"], "MACs"))


def show_path(path: Sequence[int], space: Space, console: Console) -> None:
    facts = path_facts(path, space)
    table = Table(title=Text(facts["name"] or f"A network of {space.name}"), title_justify="left", show_footer=True)
    table.add_column("where", "total")
    table.add_column("op")
    table.add_column("input", justify="right")
    table.add_column("output", justify="right")
    table.add_column("MACs", f"{facts['macs']:,}", justify="right")
    table.add_column("parameters", f"{facts['params']:,}", justify="right")
    most = max(layer["macs"] for layer in facts["layers"])
    table.add_column("share of MACs")
    for layer in facts["layers"]:
        at_end = layer["where"] == "classifier"
        before = str(layer["in_channels"]) if at_end else f"{layer['in_size']}²×{layer['in_channels']}"
        after = str(space.num_classes) if at_end else f"{layer['out_size']}²×{layer['out_channels']}"
        op = Text("FC") if at_end else _op(layer["op"])
        bar = "█" * round(20 * layer["macs"] / max(most, 1))
        table.add_row(layer["where"], op, before, after, f"{layer['macs']:,}", f"{layer['params']:,}", bar)
    console.print(table)
    console.print(
        f"path {facts['compact']} of {space.name} at {space.image_size} px, {space.num_classes} classes",
        highlight=False,
        markup=False,
    )


def _layer_facts(layer: Layer) -> dict[str, Any]:
    return {
        "where": layer.where,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "stride": layer.stride,
        "in_size": layer.in_size,
        "out_size": layer.out_size,
    }


def _distribution(costs: Any, ends: tuple[float, float]) -> dict[str, Any]:
    """Exact ends, sampled quantiles and a histogram."""
    quantiles = {f"{q}%": int(np.percentile(costs, q)) for q in QUANTILES} | {"0%": int(ends[0]), "100%": int(ends[1])}
    counts, edges = np.histogram(costs, bins=16)
    histogram = {"edges": [int(edge) for edge in edges], "counts": counts.tolist()}
    return {
        "min": int(ends[0]),
        "max": int(ends[1]),
        "mean": float(costs.mean()),
        "quantiles": quantiles,
        "histogram": histogram,
    }


def _histogram(histogram: dict[str, Any], label: str) -> RenderableType:
    counts, edges = histogram["counts"], histogram["edges"]
    lines = [Text(f"{label} of random paths")]
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * round(BAR * count / max(counts))
        lines.append(Text(f"{_short(low):>7} – {_short(high):>7} {bar} {100 * count / sum(counts):.1f}%"))
    return Group(*lines)


def _op(name: str) -> Text:
    return Text(name, style=op_colour(name))


def _short(value: float) -> str:
    """369983648 -> `370M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
