"""Use and inspect networks: the verbs `predict`, `describe` and `latency`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greedynas.cli.commands import add_family, make_app, option, switch, verb
from greedynas.cli.options import (
    OUTPUT,
    JsonOption,
    OneFlashOption,
    OneRamOption,
    print_json,
    shown_console,
    write_text,
)
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import make_console, say

if TYPE_CHECKING:
    from greedynas.spaces.latency import LatencyTable
    from greedynas.spaces.space import Space

PANEL = "Use and inspect"
NETWORK = "Space and network"
MEASUREMENT = "Measurement"

app = make_app()
latency_app = add_family(
    app,
    "latency",
    "greedynas latency measure --space macro --out macro.json",
    help="Measure a latency table on this machine, or import one.",
    panel=PANEL,
)

SpaceOption = Annotated[str | None, option("--space", "NAME", "Name of a search space, or a YAML file.", NETWORK)]
NeededSpaceOption = Annotated[str, option("--space", "NAME", "Name of a search space, or a YAML file.", NETWORK)]
SizeOption = Annotated[int | None, option("--image-size", "N", "Height and width of the images.", NETWORK, min=1)]
ClassesOption = Annotated[int | None, option("--classes", "N", "Number of classes.", NETWORK, min=1)]
TableOption = Annotated[Path, option("--out", "FILE", "Write the table to this file.", OUTPUT)]


@verb(app, "greedynas predict runs/photos holiday.jpg --top 3", panel=PANEL)
def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run directory, a folder in its models/, or a model file written by greedynas."
        ),
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Images, or folders of images.")],
    top: Annotated[int, option("--top", "N", "Number of classes to show.", OUTPUT, min=1)] = 5,
    trust: Annotated[
        bool, switch("--trust", "Open a file that can execute code, such as one of torch.export (.pt2).", OUTPUT)
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a trained network."""
    from greedynas.deploy.prediction import predict, prediction_facts, show_predictions

    predictions = predict(model, images, top=top, trust=trust)
    if as_json:
        print_json({"model": str(model), "predictions": [prediction_facts(one) for one in predictions]})
    else:
        show_predictions(predictions, shown_console())


@verb(
    app,
    "greedynas describe --space mobilenet",
    "greedynas describe --path greedynas-a --image-size 192 --svg a.svg",
    panel=PANEL,
)
def describe(
    space: SpaceOption = None,
    path: Annotated[
        str | None,
        option("--path", "PATH", "Name of a known network, or a path as op names, digits or indices.", NETWORK),
    ] = None,
    classes: ClassesOption = None,
    image_size: SizeOption = None,
    latency_table: Annotated[
        Path | None,
        option("--latency-table", "FILE", "Show latencies from this table, written by greedynas latency.", OUTPUT),
    ] = None,
    ram: OneRamOption = None,
    flash: OneFlashOption = None,
    svg: Annotated[
        Path | None, option("--svg", "FILE", "Draw the network to this file.", OUTPUT, dir_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a search space, or a network layer by layer.

    Without options, list the search spaces and known networks that come with greedynas.
    """
    from greedynas.spaces import describe as describing
    from greedynas.spaces.budget import parse_limits
    from greedynas.spaces.drawing import draw_path
    from greedynas.spaces.latency import load_latency_table
    from greedynas.spaces.space import load_space
    from greedynas.spaces.zoo import resolve

    if (ram is not None or flash is not None) and path is None and space is None:
        raise GreedyNASError("--ram and --flash limit networks: name a --space or a --path")
    budget = parse_limits(
        {"ram": (None if ram is None else [ram], None), "flash": (None if flash is None else [flash], None)}
    )[0]
    if svg is not None and path is None:
        raise GreedyNASError("--svg draws a network: name one with --path")
    if latency_table is not None and path is None and space is None:
        raise GreedyNASError("--latency-table prices networks: name a --space or a --path")
    latency = None if latency_table is None else load_latency_table(latency_table)
    chosen = None if space is None else load_space(space).adapt(classes, image_size)
    if path is not None:
        home, ops = resolve(path, chosen)
        home = home.adapt(classes, image_size)
        facts = describing.path_facts(ops, home, latency)
        if svg is not None:
            write_text(svg, draw_path(ops, home, facts["name"] or ""))
        if as_json:
            print_json(facts)
        else:
            describing.show_path(ops, home, shown_console(), latency, budget)
            if svg is not None:
                say(f"drawn to {svg}")
    elif chosen is not None:
        if as_json:
            print_json(describing.space_facts(chosen, latency, budget))
        else:
            describing.show_space(chosen, shown_console(), latency, budget)
    elif as_json:
        print_json(describing.catalogue_facts())
    else:
        describing.show_catalogue(shown_console())


@verb(latency_app, "greedynas latency measure --space macro --out macro.json --threads 2")
def measure(
    space: NeededSpaceOption,
    out: TableOption,
    backend: Annotated[
        str,
        option(
            "--backend",
            "NAME",
            "Runtime to measure: onnxruntime, torch, openvino, openvino-bf16, ncnn, litert or executorch.",
            MEASUREMENT,
        ),
    ] = "onnxruntime",
    device: Annotated[
        str, option("--device", "NAME", "Device to measure: cpu, or cuda with torch.", MEASUREMENT)
    ] = "cpu",
    threads: Annotated[int, option("--threads", "N", "Number of CPU threads.", MEASUREMENT, min=1)] = 1,
    image_size: SizeOption = None,
    classes: ClassesOption = None,
    repeats: Annotated[
        int, option("--repeats", "N", "Number of rounds over all blocks.", MEASUREMENT, min=1, max=100000)
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """Measure every block of a search space on this machine.

    The blocks and a few whole networks are timed on one image at a time.
    """
    from greedynas.spaces.space import load_space

    home = load_space(space).adapt(classes, image_size)
    if not out.parent.is_dir() or out.is_dir():  # checked before the measurement, which takes minutes
        raise GreedyNASError(f"cannot write {out}")
    from greedynas.deploy.latency_measurement import measure_latency, show_progress

    with show_progress(make_console(stderr=True)) as progress:
        table = measure_latency(home, backend, device=device, threads=threads, repeats=repeats, progress=progress)
    _finish_table(table, home, _told(space, classes, image_size), out, as_json)


@verb(latency_app, "greedynas latency kit --space pocket --runtime litert --out kit/")
def kit(
    space: NeededSpaceOption,
    out: Annotated[Path, option("--out", "DIR", "Write the kit to this new folder.", OUTPUT)],
    runtime: Annotated[
        str, option("--runtime", "NAME", "Runtime of the device: litert, onnxruntime or executorch.", MEASUREMENT)
    ] = "onnxruntime",
    image_size: SizeOption = None,
    classes: ClassesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write files and a script for timing blocks on another device.

    Copy the folder to a phone or a board, run its run.py there, and import the timings that it writes.
    """
    from greedynas.deploy.latency_kit import write_kit
    from greedynas.deploy.latency_measurement import show_progress
    from greedynas.spaces.space import load_space

    home = load_space(space).adapt(classes, image_size)
    with show_progress(make_console(stderr=True)) as progress:
        made = write_kit(home, runtime, out, progress)
    if as_json:
        print_json({"kit": str(out), "graphs": len(made.graphs), "runtime": runtime})
        return
    say(f"{len(made.graphs)} graphs written to {out}; on the device: python3 run.py")
    say(f"then: greedynas latency import timings.json --space {_told(space, classes, image_size)} --out table.json")


@verb(latency_app, "greedynas latency import pixel.yaml --space mobilenet --out lat.json", name="import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A YAML file in the format of ProxylessNAS, a kit's timings.json, or a table."
        ),
    ],
    space: NeededSpaceOption,
    out: TableOption,
    nearest_width: Annotated[
        bool, switch("--nearest-width", "Take missing entries from the nearest channel width.", "Import")
    ] = False,
    image_size: SizeOption = None,
    classes: ClassesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import latencies that were measured elsewhere."""
    from greedynas.deploy.latency_import import import_latency
    from greedynas.spaces.space import load_space

    home = load_space(space).adapt(classes, image_size)
    table = import_latency(file, home, nearest_width=nearest_width)
    _finish_table(table, home, _told(space, classes, image_size), out, as_json)


def _told(space: str, classes: int | None, image_size: int | None) -> str:
    """Return the options that name the space of a table, as they were given."""
    given = {"--classes": classes, "--image-size": image_size}
    return " ".join([space, *(f"{name} {value}" for name, value in given.items() if value is not None)])


def _finish_table(table: "LatencyTable", space: "Space", named: str, out: Path, as_json: bool) -> None:
    """Save a latency table and show it."""
    from greedynas.spaces.describe import show_table, table_facts

    table.save(out)
    if as_json:
        print_json({"out": str(out), **table_facts(table, space)})
    else:
        show_table(table, space, named, str(out), shown_console())
