"""The command line: one verb a job. Wrong input is one line on stderr and exit code 2."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from greedynas.errors import GreedyNASError

# Newer typer brings its own click, older typer uses the installed one: ask typer which.
UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

SpaceOption = Annotated[str | None, typer.Option("--space", help="A space that ships, or a YAML file.")]
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
    classes: Annotated[int | None, typer.Option("--classes", min=1, help="Number of classes.")] = None,
    image_size: Annotated[
        int | None, typer.Option("--image-size", min=1, help="Height and width of the images.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the network into this file.", dir_okay=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """What is in a space, or what a network costs layer by layer."""
    from greedynas import describe as describing
    from greedynas.drawing import draw_path
    from greedynas.known import resolve
    from greedynas.space import load_space

    if svg is not None and path is None:
        raise GreedyNASError("--svg draws a network: name one with --path")
    chosen = None if space is None else load_space(space).adapt(classes, image_size)
    if path is not None:
        home, ops = resolve(path, chosen)
        home = home.adapt(classes, image_size)
        facts = describing.path_facts(ops, home)
        if svg is not None:
            _write(svg, draw_path(ops, home, facts["name"] or ""))
        if as_json:
            _print_json(facts)
        else:
            describing.show_path(ops, home, _console())
            if svg is not None:
                typer.echo(f"drawn to {svg}")
    elif chosen is not None:
        if as_json:
            _print_json(describing.space_facts(chosen))
        else:
            describing.show_space(chosen, _console())
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

            typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
            _console().print(plan_table(config))
        return
    if out is None:
        raise GreedyNASError("name the run directory with --out")
    from greedynas.stages import train_stage

    console = Console(stderr=True) if as_json else _console()
    result = train_stage(config, out, console)
    if as_json:
        _print_json({"run": str(out), **result})
        return
    console.print(
        f"Trained for {result['epochs']} epochs ({result['stopped']}): {result['optimization_images']:,} optimization and "
        f"{result['evaluation_images']:,} evaluation images, {result['corrected_images']:,.0f} corrected "
        f"(measured r = {result['measured_ratio']:.2f}). Pool: {result['pool']} paths.",
        highlight=False,
    )


@app.command(epilog="Example: greedynas demo")
def demo() -> None:
    """A first look on this machine: networks of the `fashion` space under a budget, and one of them run in PyTorch."""
    from greedynas.demo import run_demo

    run_demo(_console())


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
