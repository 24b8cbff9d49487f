"""Descriptions of spaces, networks and latency tables: as plain data for `--json` and as rich tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.budget import Budget
from greedynas.spaces.colours import op_colour
from greedynas.spaces.feasible import sample_feasible, within
from greedynas.spaces.latency import Entry, LatencyTable
from greedynas.spaces.memory import classifier_memory, cost_tables_for, layer_memory, memory_tables
from greedynas.spaces.ops import linear_cost
from greedynas.spaces.paths import canonical, compact, op_names
from greedynas.spaces.space import Layer, Space, load_space, space_names
from greedynas.spaces.zoo import known_networks

FLOAT = 4  # bytes
SAMPLES = 100_000
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
BAR = 40


def space_facts(space: Space, latency: LatencyTable | None = None, budget: Budget | None = None) -> dict[str, Any]:
    """Return the facts of a space: layers, size, the range of its costs and their distribution over random paths."""
    paths = space.sample(SAMPLES, np.random.default_rng(0))
    costs = space.costs(paths)
    params = space.cost_tables["params"]
    supernet = supernet_params(space)
    facts: dict[str, Any] = {
        "space": space.name,
        "image_size": space.image_size,
        "image_channels": space.image_channels,
        "num_classes": space.num_classes,
        "activation": space.activation,
        "paths": space.size,
        "supernet_params": supernet,
        # Reduced over several GPUs in a training step: the gradients of the active path; of all ops with the
        # fair sampler.
        "gradient_bytes": {
            "mean": FLOAT * params.mean,
            "most": FLOAT * int(params.range[1]),
            "supernet": FLOAT * supernet,
        },
        "layers": [_layer_facts(layer) | {"ops": list(layer.ops)} for layer in space.layers],
        "macs": _distribution(costs.macs, space.cost_tables["macs"].range),
        "params": _distribution(costs.params, space.cost_tables["params"].range),
        "sampled_paths": SAMPLES,
    }
    if latency is not None:
        table = latency.cost_table(space)
        priced = table(paths)
        priced = priced[~np.isnan(priced)]
        facts["latency_ms"] = _distribution(priced, table.range, float) if len(priced) else None
        facts["unpriceable_share"] = latency.unpriceable_share()
    try:
        facts |= {cost: _distribution(table(paths), table.range) for cost, table in memory_tables(space).items()}
    except GreedyNASError:  # registered ops, blocks of pretrained networks
        facts |= {"ram": None, "flash": None}
    if budget is not None and budget.limits():
        tables = cost_tables_for(space, budget.limits())
        sample_feasible(tables, budget.limits(), 1, np.random.default_rng(0))  # raises an error if no path fits
        facts["share_within"] = float(within(tables, budget.limits(), paths).mean())
    return facts


def supernet_params(space: Space) -> int:
    """Return the number of parameters of the supernet of a space."""
    params = space.cost_tables["params"]
    total = int(params.fixed)
    for number, layer in enumerate(space.layers):
        if space.base is None or layer.block is None:
            total += int(params.cells(number).sum())
        else:
            total += layer.block.shared_params(layer.ops, layer.in_channels, layer.out_channels)
    return total


def path_facts(path: Sequence[int], space: Space, latency: LatencyTable | None = None) -> dict[str, Any]:
    """Return the facts of a path: shapes and costs of every layer, and sums; `latency_ms` is None without a price."""
    costs = space.costs([path])
    names = op_names(path, space)
    at_size, ops = space.settle(path)  # without the choice of an image size, which is no block
    rows = [(layer, layer.ops[0]) for layer in at_size.stem_layers]
    rows += list(zip(at_size.layers, op_names(ops, at_size), strict=True))
    rows += [(layer, layer.ops[0]) for layer in (*at_size.head_layers, *at_size.neck_layers)]
    layers = [_layer_facts(layer) | {"op": op} | layer.cost(op)._asdict() for layer, op in rows]
    classifier = linear_cost(space.features, space.num_classes)
    layers.append(
        {"where": "classifier", "op": f"FC {space.num_classes}", "in_channels": space.features} | classifier._asdict()
    )
    facts: dict[str, Any] = {
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
        "image_size": at_size.image_size,
        "num_classes": space.num_classes,
        "layers": layers,
    }
    facts |= _memory(at_size, ops)
    if latency is not None:
        facts["latency_ms"] = latency.price(path, space)
        facts["latency_constant_ms"] = latency.constant_ms
        facts["latency_device"] = f"{latency.device}, {latency.backend}"
        stem = len(space.stem)
        priced = (*latency.fixed[:stem], *latency.layers, *latency.fixed[stem:])
        for layer, row in zip(layers, priced, strict=True):
            entry = row.ops["FC" if layer["where"] == "classifier" else layer["op"]]
            layer["latency_ms"] = None if entry is None else entry.ms
    return facts


def _memory(space: Space, path: Sequence[int]) -> dict[str, Any]:
    """Return the peak of activations and the flash of a path in int8, and where the peak is; None if not known."""
    try:
        tables = memory_tables(space)
        rows = [(layer, layer.ops[0]) for layer in (*space.stem_layers, *space.head_layers, *space.neck_layers)]
        rows += [(layer, layer.ops[op]) for layer, op in zip(space.layers, path, strict=True)]
        peaks = {f"{op} in {layer.where}, {layer.in_size} px": layer_memory(layer, op)[0] for layer, op in rows}
    except GreedyNASError:  # registered ops, blocks of pretrained networks
        return {"ram": None, "flash": None}
    peaks["classifier"] = classifier_memory(space)[0]
    found = {cost: int(table(np.array([path]))[0]) for cost, table in tables.items()}
    return {**found, "ram_at": next(where for where, peak in peaks.items() if peak == found["ram"])}


def memory_line(facts: dict[str, Any], budget: Budget) -> str:
    """Return the memory of a path as a sentence, and whether it keeps the limits."""
    if facts["ram"] is None:
        return "memory on microcontrollers: not known for these ops"
    line = (
        f"in int8: {_kib(facts['ram'])} of RAM for activations (at {facts['ram_at']}), {_kib(facts['flash'])} of flash"
    )
    limits = {cost: high for cost, (_, high) in budget.limits().items() if high is not None}
    over = [f"{cost} is limited to {_kib(limit)}" for cost, limit in limits.items() if facts[cost] > limit]
    return line if not limits else f"{line}: {'; '.join(over) or 'within the limits'}"


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f} KiB"


def table_facts(latency: LatencyTable, space: Space) -> dict[str, Any]:
    """Return the facts of a latency table: its origin, its missing entries, and the range of latencies in the space."""
    cheapest, most_expensive = latency.cost_table(space).range
    return {
        **latency.model_dump(exclude={"layers", "fixed", "schema_version"}),
        "fingerprint": latency.fingerprint,
        "entries": sum(len(row.ops) for row in (*latency.layers, *latency.fixed)),
        "borrowed": latency.borrowed(),
        "missing": latency.missing(),
        "priceable_paths": latency.priceable_paths(),
        "unpriceable_share": latency.unpriceable_share(),
        "cheapest_ms": cheapest,
        "dearest_ms": most_expensive,
    }


def show_catalogue(console: Console) -> None:
    """Print all spaces and networks that have a name."""
    spaces = Table(title="Spaces", title_justify="left")
    for column in ("name", "layers", "paths", "image", "MACs", "parameters"):
        spaces.add_column(column, justify="left" if column == "name" else "right")
    homes = {name: load_space(name) for name in space_names()}
    for name, space in homes.items():
        ranges = [" – ".join(_short(end) for end in space.cost_tables[cost].range) for cost in ("macs", "params")]
        spaces.add_row(name, str(len(space.layers)), f"{space.size:.3g}", f"{space.image_size} px", *ranges)
    networks = Table(title="Known networks", title_justify="left")
    for column in ("name", "space", "MACs", "parameters"):
        networks.add_column(column, justify="left" if column in ("name", "space") else "right")
    for known in known_networks().values():
        costs = homes[known.space].costs([known.path])
        networks.add_row(known.name, known.space, f"{costs.macs[0]:,}", f"{costs.params[0]:,}")
    console.print(spaces, networks)
    commands = (Text(f"greedynas describe {what}", "bold") for what in ("--space mobilenet", "--path greedynas-a"))
    console.print("Next:", next(commands), "or", next(commands))


def catalogue_facts() -> dict[str, Any]:
    """Return the names of all spaces and known networks."""
    known = {name: {"space": network.space, "path": list(network.path)} for name, network in known_networks().items()}
    return {"spaces": space_names(), "known_networks": known}


def show_space(
    space: Space, console: Console, latency: LatencyTable | None = None, budget: Budget | None = None
) -> None:
    facts = space_facts(space, latency, budget)
    table = Table(title=Text(f"Space {space.name}"), title_justify="left")
    for column in ("layers", "width", "stride", "input", "ops"):
        table.add_column(column, justify="left" if column == "ops" else "right")
    if space.sizes:
        choice = space.layers[0]
        sizes = Text(" ").join(_op(op) for op in choice.ops)
        table.add_row("0", "", "", f"{choice.in_size}²×{choice.in_channels}", sizes)
    first = 1 if space.sizes else 0
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
        f"{facts['paths']:,} paths; a supernet with {facts['supernet_params']:,} parameters; "
        f"{space.image_size} px, {space.num_classes} classes",
        highlight=False,
    )
    sent = {name: f"{count / 1e6:.3g} MB" for name, count in facts["gradient_bytes"].items()}
    console.print(
        f"On several GPUs, a training step reduces the gradients of one path: {sent['mean']} on average, "
        f"{sent['most']} at most, of {sent['supernet']}",
        highlight=False,
    )
    costs = Table(title=f"Costs over {SAMPLES:,} random paths", title_justify="left")
    costs.add_column("")
    for quantile in QUANTILES:
        costs.add_column(
            {0: "cheapest", 50: "median", 100: "most expensive"}.get(quantile, f"{quantile}%"), justify="right"
        )
    for label, cost in (("MACs", "macs"), ("parameters", "params")):
        costs.add_row(label, *(_short(value) for value in facts[cost]["quantiles"].values()))
    if facts.get("latency_ms"):
        costs.add_row("latency in ms", *(f"{value:.4g}" for value in facts["latency_ms"]["quantiles"].values()))
    for label, cost in (("int8 RAM in KiB", "ram"), ("int8 flash in KiB", "flash")):
        if facts[cost] is not None:
            costs.add_row(label, *(f"{value / 1024:,.4g}" for value in facts[cost]["quantiles"].values()))
    console.print(costs)
    if "share_within" in facts:
        console.print(f"{facts['share_within']:.2%} of random paths are within the limits", highlight=False)
    if facts.get("unpriceable_share"):
        share = f"{facts['unpriceable_share']:.2%}"
        console.print(f"{share} of all paths use an op that the latency table lacks; their latency cannot be predicted")
    console.print(_histogram(facts["macs"]["histogram"], "MACs"))


def show_path(
    path: Sequence[int],
    space: Space,
    console: Console,
    latency: LatencyTable | None = None,
    budget: Budget | None = None,
) -> None:
    facts = path_facts(path, space, latency)
    table = Table(title=Text(facts["name"] or f"A network of {space.name}"), title_justify="left", show_footer=True)
    table.add_column("where", "total")
    table.add_column("op")
    table.add_column("input", justify="right")
    table.add_column("output", justify="right")
    table.add_column("MACs", f"{facts['macs']:,}", justify="right")
    table.add_column("parameters", f"{facts['params']:,}", justify="right")
    most = max(layer["macs"] for layer in facts["layers"])
    if latency is not None:
        table.add_column("ms", _milliseconds(facts["latency_ms"]), justify="right")
    table.add_column("share of MACs")
    for layer in facts["layers"]:
        at_end = layer["where"] == "classifier"
        before = str(layer["in_channels"]) if at_end else f"{layer['in_size']}²×{layer['in_channels']}"
        after = str(space.num_classes) if at_end else f"{layer['out_size']}²×{layer['out_channels']}"
        op = Text("FC") if at_end else _op(layer["op"])
        bar = "█" * round(20 * layer["macs"] / max(most, 1))
        priced = [] if latency is None else [_milliseconds(layer["latency_ms"])]
        table.add_row(layer["where"], op, before, after, f"{layer['macs']:,}", f"{layer['params']:,}", *priced, bar)
    console.print(table)
    if latency is not None:
        what = (
            "not predicted, the table lacks an op"
            if facts["latency_ms"] is None
            else f"{_milliseconds(facts['latency_ms'])} ms"
        )
        constant = f", including a constant of {latency.constant_ms:.3f} ms" if latency.constant_ms else ""
        console.print(f"latency: {what}{constant} ({facts['latency_device']})", highlight=False, markup=False)
    console.print(memory_line(facts, budget or Budget()), highlight=False, markup=False)
    console.print(
        f"path {facts['compact']} of {space.name} at {facts['image_size']} px, {space.num_classes} classes",
        highlight=False,
        markup=False,
    )


def show_table(latency: LatencyTable, space: Space, named: str, file: str, console: Console) -> None:
    """Print a latency table, with one column for neighbouring layers that are alike, and the range of latencies."""
    facts = table_facts(latency, space)
    table = Table(title=Text(f"Latency of the blocks of {space.name}, ms"), title_justify="left")
    table.add_column(Group("layers", "input", "width"))
    columns = _alike(latency)
    for first, last in columns:
        row = latency.layers[first]
        numbers = f"{first}" if first == last else f"{first}–{last}"
        header = Group(numbers, f"{row.in_size}²×{row.in_channels}", str(row.out_channels))
        table.add_column(header, justify="right")
    for op in dict.fromkeys(op for row in latency.layers for op in row.ops):
        rows = [latency.layers[first].ops for first, _ in columns]
        table.add_row(_op(op), *(_entry(row[op]) if op in row else "" for row in rows))
    console.print(table)
    threads = "" if latency.threads is None else f", {latency.threads} thread{'s' * (latency.threads > 1)}"
    lines = [f"{latency.device}, {latency.backend}{threads}"]
    lines.append(f"paths take {facts['cheapest_ms']:.3f} to {facts['dearest_ms']:.3f} ms")
    if latency.fit is not None:
        lines[-1] += (
            f", with a constant of {latency.constant_ms:.3f} ms fitted on {latency.fit.networks} whole networks"
        )
        lines[-1] += f" (median error there {latency.fit.median_error:.1%})"
    if facts["borrowed"]:
        lines.append(f"{facts['borrowed']} of {facts['entries']} entries are borrowed from another width (marked *)")
    if facts["missing"]:
        lines.append(
            f"{len(facts['missing'])} entries are missing: under a latency limit, paths that use them are left out, "
            f"and {facts['priceable_paths']:.3g} of {space.size:.3g} remain ({1 - facts['unpriceable_share']:.2%})"
        )
    lines.append(f"Next: greedynas describe --space {named} --latency-table {file}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _alike(latency: LatencyTable) -> list[tuple[int, int]]:
    """Return the ranges of neighbouring layers with the same entries."""
    ranges: list[tuple[int, int]] = []
    for i, row in enumerate(latency.layers):
        if i and row == latency.layers[i - 1]:
            ranges[-1] = (ranges[-1][0], i)
        else:
            ranges.append((i, i))
    return ranges


def _entry(entry: Entry | None) -> str:
    return "none" if entry is None else f"{entry.ms:.3f}{'*' if entry.borrowed else ''}"


def _layer_facts(layer: Layer) -> dict[str, Any]:
    return {
        "where": layer.where,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "stride": layer.stride,
        "in_size": layer.in_size,
        "out_size": layer.out_size,
    }


def _distribution(costs: Any, ends: tuple[float, float], number: type[int] | type[float] = int) -> dict[str, Any]:
    """Return sampled quantiles with exact ends, and a histogram."""
    low, high = number(ends[0]), number(ends[1])
    quantiles = {f"{q}%": number(np.percentile(costs, q)) for q in QUANTILES} | {"0%": low, "100%": high}
    counts, edges = np.histogram(costs, bins=16)
    histogram = {"edges": [number(edge) for edge in edges], "counts": counts.tolist()}
    return {
        "min": low,
        "max": high,
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


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _op(name: str) -> Text:
    return Text(name, style=op_colour(name))


def _short(value: float) -> str:
    """Return a number with three digits and its unit: 369983648 -> `370M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
