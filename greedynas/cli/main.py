"""The command line: one verb a job. Wrong input is one line on stderr and exit code 2."""

import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from greedynas.cli import stages  # noqa: F401 (the verbs of all these, in the order of --help)

# isort: split
from greedynas.cli import bench, contests, studies  # noqa: F401
from greedynas.cli.options import JsonOption, app, print_json, shown_console, write_text
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.signals import Stopped, signals_caught
from greedynas.runtime.terminal import complain, make_console, say, steady_streams

if TYPE_CHECKING:
    from greedynas.spaces.latency import LatencyTable
    from greedynas.spaces.space import Space

# OpenMP's threads wait for each other by spinning. Beside any other busy process on a small machine that made training a
# hundred times slower (2,200 ms a step instead of 18, on 2 cores); after few turns they sleep instead, for 20% when alone.
# Read when torch is loaded, which is later.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Newer typer brings its own click, older typer uses the installed one: ask typer which.
UsageError: Any = typer.BadParameter.__base__

latency_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(latency_app, name="latency", help="Measure a latency table on this machine, or import one.")

SpaceOption = Annotated[str | None, typer.Option("--space", help="A space that ships, or a YAML file.")]
NeededSpaceOption = Annotated[str, typer.Option("--space", help="A space that ships, or a YAML file.")]
SizeOption = Annotated[int | None, typer.Option("--image-size", min=1, help="Height and width of the images.")]
ClassesOption = Annotated[int | None, typer.Option("--classes", min=1, help="Number of classes.")]
TableOption = Annotated[Path, typer.Option("--out", help="Write the table into this file.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """A small image classifier for your data and hardware budget, by one-shot search with a greedy supernet."""
    if version:
        from greedynas._version import __version__

        say(__version__)
    elif context.invoked_subcommand is None:
        say(context.get_help(), lines=True)


@app.command(epilog="Example: greedynas describe --path greedynas-a --image-size 192 --svg greedynas-a.svg")
def describe(
    space: SpaceOption = None,
    path: Annotated[str | None, typer.Option("--path", help="Op names, digits or indices, or a known network.")] = None,
    classes: ClassesOption = None,
    image_size: SizeOption = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the network into this file.", dir_okay=False)] = None,
    latency_table: Annotated[
        Path | None, typer.Option("--latency-table", help="Add latencies from this file (see greedynas latency).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What is in a space, or what a network costs layer by layer."""
    from greedynas.spaces import describe as describing
    from greedynas.spaces.drawing import draw_path
    from greedynas.spaces.latency import load_latency_table
    from greedynas.spaces.space import load_space
    from greedynas.spaces.zoo import resolve

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
            describing.show_path(ops, home, shown_console(), latency)
            if svg is not None:
                say(f"drawn to {svg}")
    elif chosen is not None:
        if as_json:
            print_json(describing.space_facts(chosen, latency))
        else:
            describing.show_space(chosen, shown_console(), latency)
    elif as_json:
        print_json(describing.catalogue_facts())
    else:
        describing.show_catalogue(shown_console())


@latency_app.callback(invoke_without_command=True)
def latency_root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help(), lines=True)


@latency_app.command(epilog="Example: greedynas latency measure --space macro --backend onnxruntime --out macro.json")
def measure(
    space: NeededSpaceOption,
    out: TableOption,
    backend: Annotated[str, typer.Option("--backend", help="onnxruntime or torch.")] = "onnxruntime",
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda with torch.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of the CPU.")] = 1,
    image_size: SizeOption = None,
    classes: ClassesOption = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100_000, help="Rounds over all blocks.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Time every block of a space on this machine, one image at a time, and a few whole networks."""
    from greedynas.spaces.space import load_space

    home = load_space(space).adapt(classes, image_size)
    if not out.parent.is_dir() or out.is_dir():  # before minutes of measuring, not after
        raise GreedyNASError(f"cannot write {out}")
    from greedynas.deploy.latency_measurement import measure_latency, show_progress

    with show_progress(make_console(stderr=True)) as progress:
        table = measure_latency(home, backend, device=device, threads=threads, repeats=repeats, progress=progress)
    _finish_table(table, home, out, as_json)


@latency_app.command(
    "import",
    epilog="Example: greedynas latency import pixel1.yaml --space mobilenet --out pixel1.json --nearest-width",
)
def import_(
    file: Annotated[Path, typer.Argument(help="A YAML file in ProxylessNAS's format, or a table of ours.")],
    space: NeededSpaceOption,
    out: TableOption,
    nearest_width: Annotated[
        bool, typer.Option("--nearest-width", help="Borrow missing entries from the nearest channel width.")
    ] = False,
    image_size: SizeOption = None,
    classes: ClassesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a latency table of timings from elsewhere."""
    from greedynas.deploy.latency_import import import_latency
    from greedynas.spaces.space import load_space

    home = load_space(space).adapt(classes, image_size)
    _finish_table(import_latency(file, home, nearest_width=nearest_width), home, out, as_json)


def _finish_table(table: "LatencyTable", space: "Space", out: Path, as_json: bool) -> None:
    from greedynas.spaces.describe import show_table, table_facts

    table.save(out)
    if as_json:
        print_json({"out": str(out), **table_facts(table, space)})
    else:
        show_table(table, space, str(out), shown_console())


@app.command(epilog="Example: greedynas predict runs/photos holiday.jpg --top 3")
def predict(
    model: Annotated[Path, typer.Argument(help="A run directory, a folder in its models/, or a model file of ours.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
    top: Annotated[int, typer.Option("--top", min=1, help="Classes to show for each image.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Classify images with a trained network."""
    from greedynas.deploy.prediction import predict, prediction_facts, show_predictions

    predictions = predict(model, images, top=top)
    if as_json:
        print_json({"model": str(model), "predictions": [prediction_facts(one) for one in predictions]})
    else:
        show_predictions(predictions, shown_console())


def main() -> None:
    """Run the command line; every expected failure is one line and exit code 2."""
    try:
        _run_steadily()
    except SystemExit as end:
        if "WORLD_SIZE" in os.environ:
            from greedynas.runtime.parallel.ranks import leave

            leave(end.code if isinstance(end.code, int) else 0)
        raise


def _run_steadily() -> NoReturn:
    try:
        with steady_streams():
            _run()
    except OSError as error:  # of the streams alone
        _fail(f"{error.filename}: {error.strerror}; what was written there is not complete, all else is done")


def _run() -> NoReturn:
    _show_warnings()
    try:
        with signals_caught(), _ranks():
            code = _call_app()
    except GreedyNASError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(f"{error.format_message()} (see greedynas --help)")
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            complain(str(stopped))
        sys.exit(stopped.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped")
        sys.exit(130)
    except (OSError, MemoryError) as error:  # the machine's: a full disk, a file that may not be read
        _fail(_told(error))
    sys.exit(code if isinstance(code, int) else 0)


def _call_app() -> object:
    """Run the verb. What PyTorch reports as a RuntimeError, but is the machine's doing, becomes a line."""
    if not Path(__file__).is_file():  # spaces, presets and the sample are files beside this one
        raise GreedyNASError("greedynas cannot be used from inside of a zip file or a wheel: install that with pip")
    try:
        return app(standalone_mode=False)
    except RuntimeError as error:
        if "DataLoader worker" in str(error):
            raise GreedyNASError(
                f"a process that reads images has ended ({str(error).partition(chr(10))[0]:.200}): where memory is short, lower "
                "data.workers or data.memory_gb; what is saved is kept, and the same command goes on from there"
            ) from None
        if "can't allocate memory" in str(error):  # PyTorch on a CPU
            raise MemoryError from None
        raise


def _ranks() -> AbstractContextManager[None]:
    """Those that torchrun started, if it did."""
    if "WORLD_SIZE" not in os.environ:
        return nullcontext()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of every connection that ends
    import shlex

    import torch

    from greedynas._version import __version__
    from greedynas.runtime.parallel.ranks import ranks

    versions = {"version of greedynas": __version__, "version of PyTorch": torch.__version__}
    return ranks({**versions, "command": shlex.join(sys.argv[1:])})


def _show_warnings() -> None:
    """What goes wrong without stopping the work (a damaged checkpoint, a skipped image) is shown as well as logged."""
    warnings.filterwarnings("ignore", module="PIL")  # of strange image files; those that cannot be read are told anyway
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("greedynas").addHandler(handler)


def _told(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; nothing is lost: put that right, and give the same command again"


def _fail(message: str) -> NoReturn:
    line = " ".join(message.split())
    complain(f"error: {line}")
    sys.exit(2)
