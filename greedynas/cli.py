"""The command line: one verb a job. Wrong input is one line on stderr and exit code 2."""

import json
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


@app.command(epilog="Example: greedynas demo")
def demo() -> None:
    """A first look on this machine: networks of the `fashion` space under a budget, and one of them run in PyTorch."""
    from greedynas.demo import run_demo

    run_demo(_console())


def main() -> None:
    """Run the command line; every expected failure is one line and exit code 2."""
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
