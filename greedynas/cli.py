"""The command line: one verb a job. Wrong input is one line on stderr and exit code 2."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from greedynas.errors import GreedyNASError

if TYPE_CHECKING:
    from greedynas.latency import LatencyTable
    from greedynas.space import Space

# Newer typer brings its own click, older typer uses the installed one: ask typer which.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

latency_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(latency_app, name="latency", help="Measure a latency table on this machine, or import one.")

SpaceOption = Annotated[str | None, typer.Option("--space", help="A space that ships, or a YAML file.")]
NeededSpaceOption = Annotated[str, typer.Option("--space", help="A space that ships, or a YAML file.")]
SizeOption = Annotated[int | None, typer.Option("--image-size", min=1, help="Height and width of the images.")]
ClassesOption = Annotated[int | None, typer.Option("--classes", min=1, help="Number of classes.")]
TableOption = Annotated[Path, typer.Option("--out", help="Write the table into this file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """The best small image classifier for your data and hardware budget, by one-shot search with a greedy supernet."""
    if version:
        from greedynas import __version__

        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


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
    from greedynas import describe as describing
    from greedynas.drawing import draw_path
    from greedynas.known import resolve
    from greedynas.latency import load_latency_table
    from greedynas.space import load_space

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
            _write(svg, draw_path(ops, home, facts["name"] or ""))
        if as_json:
            _print_json(facts)
        else:
            describing.show_path(ops, home, _console(), latency)
            if svg is not None:
                typer.echo(f"drawn to {svg}")
    elif chosen is not None:
        if as_json:
            _print_json(describing.space_facts(chosen, latency))
        else:
            describing.show_space(chosen, _console(), latency)
    elif as_json:
        _print_json(describing.catalogue_facts())
    else:
        describing.show_catalogue(_console())


@app.command(
    epilog="Example: greedynas train cifar10 --data photos/ --out runs/photos --set train.max_epochs=50 --seed 1"
)
def train(
    preset: Annotated[str, typer.Argument(help="A preset (fashion, cifar10, imagenet, imagenet-se) or a YAML file.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="A folder with train/ and val/ or test/, a folder of class folders, a timm name, or fashion."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run directory; the same command again resumes.")
    ] = None,
    sampler: Annotated[str | None, typer.Option("--sampler", help="greedy, uniform or fair.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as often as you like.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of every random stream.")] = None,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Print the resolved settings and the cost, train nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a supernet: greedy (Algorithms 1 and 2), or one of the methods it is compared with."""
    from greedynas.config import load_config, parse_assignments

    changes = parse_assignments(settings or [])
    changes |= {
        key: value
        for key, value in (("data.source", data), ("train.sampler", sampler), ("seed", seed))
        if value is not None
    }
    config = load_config(preset, changes)
    if only_plan:
        from greedynas.stages import plan, plan_table

        if as_json:
            _print_json({"config": config.model_dump(mode="json"), "plan": plan(config)})
        else:
            import yaml

            table = plan_table(config)
            typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
            _console().print(table)
        return
    if out is None:
        raise GreedyNASError("name the run directory with --out")
    from greedynas.stages import report_training, train_stage

    console = Console(stderr=True) if as_json else _console()
    result = train_stage(config, out, console)
    if as_json:
        _print_json({"run": str(out), **result})
    else:
        report_training(result, out, config.space, console)


@app.command(epilog="Example: greedynas search runs/photos --flops 330M --flops 280M --params 5M")
def search(
    run: Annotated[Path, typer.Argument(help="A run directory with a trained supernet.")],
    flops: Annotated[
        list[str] | None, typer.Option("--flops", help="At most so many multiply-adds: 330M. Several give a family.")
    ] = None,
    params: Annotated[list[str] | None, typer.Option("--params", help="At most so many parameters: 5M.")] = None,
    latency: Annotated[
        list[str] | None, typer.Option("--latency", help="At most so long: 80ms. Needs a table.")
    ] = None,
    latency_table: Annotated[Path | None, typer.Option("--latency-table", help="From greedynas latency.")] = None,
    min_flops: Annotated[str | None, typer.Option("--min-flops", help="At least so many multiply-adds.")] = None,
    min_params: Annotated[str | None, typer.Option("--min-params", help="At least so many parameters.")] = None,
    min_latency: Annotated[str | None, typer.Option("--min-latency", help="At least so long.")] = None,
    searcher: Annotated[str, typer.Option("--searcher", help="evolution (NSGA-II) or random.")] = "evolution",
    pool_init: Annotated[
        bool, typer.Option("--pool-init/--no-pool-init", help="Start from the candidate pool.")
    ] = True,
    front: Annotated[
        bool, typer.Option("--front", help="The best network at every cost, not only under the limit.")
    ] = False,
    objectives: Annotated[str, typer.Option("--objectives", help="Costs of the front: macs, or macs,params.")] = "macs",
    name: Annotated[
        str | None, typer.Option("--name", help="Of the search; made from the budget if not given.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as often as you like.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the search; the run's own if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best path under a budget on a trained supernet (Algorithm 3), or by random search."""
    from greedynas.searches import make_requests, report_searches, search_stage

    limits = {"macs": (flops, min_flops), "params": (params, min_params), "latency_ms": (latency, min_latency)}
    chosen = tuple(objectives.split(",")) if front else ()
    requests = make_requests(run, limits, searcher, chosen, pool_init, name, settings or [], seed)
    console = Console(stderr=True) if as_json else _console()
    results = search_stage(run, requests, latency_table, console)
    if as_json:
        _print_json({"run": str(run), "searches": results})
    else:
        report_searches(results, run, front, console)


@latency_app.callback(invoke_without_command=True)
def latency_root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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
    from greedynas.space import load_space

    home = load_space(space).adapt(classes, image_size)
    if not out.parent.is_dir() or out.is_dir():  # before minutes of measuring, not after
        raise GreedyNASError(f"cannot write {out}")
    from greedynas.timing import measure_latency, show_progress

    with show_progress(Console(stderr=True)) as progress:
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
    from greedynas.latency import import_latency
    from greedynas.space import load_space

    home = load_space(space).adapt(classes, image_size)
    _finish_table(import_latency(file, home, nearest_width=nearest_width), home, out, as_json)


def _finish_table(table: "LatencyTable", space: "Space", out: Path, as_json: bool) -> None:
    from greedynas.describe import show_table, table_facts

    table.save(out)
    if as_json:
        _print_json({"out": str(out), **table_facts(table, space)})
    else:
        show_table(table, space, str(out), _console())


@app.command(epilog="Example: greedynas demo")
def demo(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")] = Path("greedynas-demo"),
) -> None:
    """The job on the embedded Fashion-MNIST sample, on a CPU: so far, training a supernet and searching it."""
    from greedynas.demo import run_demo

    run_demo(out, _console())


def main() -> None:
    """Run the command line; every expected failure is one line and exit code 2."""
    _show_warnings()
    try:
        code = app(standalone_mode=False)
    except GreedyNASError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(f"{error.format_message()} (see greedynas --help)")
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `greedynas describe | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _show_warnings() -> None:
    """What goes wrong without stopping the work (a damaged checkpoint, a skipped image) is shown as well as logged."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("greedynas").addHandler(handler)


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _console() -> Console:
    """Wide enough for the tables where the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _print_json(facts: dict[str, object]) -> None:
    typer.echo(json.dumps(facts, indent=2))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
