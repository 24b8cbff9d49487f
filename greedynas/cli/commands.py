"""Define how verbs are declared, and how their help looks: panels, examples, and flags without a type."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from greedynas.cli import volume
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import say

# Newer typer brings its own click, older typer uses the installed one: ask typer which.
UsageError: Any = typer.BadParameter.__base__

GENERAL = "General"  # the panel of --json and --help

Function = TypeVar("Function", bound=Callable[..., None])


class Verb(TyperCommand):
    """Show a command's help without types beside flags and arguments, and without braces around arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with --help in the last panel."""
        params = _without_types(super().get_params(ctx))
        for param in params:
            if param.name == "help":
                param.rich_help_panel = GENERAL
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and add the command to every error."""
        with _errors_of(ctx):
            return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with a required argument written as DIR instead of {DIR}."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Family(TyperGroup):
    """Show a group's help without types beside flags, and without the two options for shell completion."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters without those for completion, which the end of the main help names."""
        params = _without_types(super().get_params(ctx))
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.hidden = True
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and add the command to every error."""
        with _errors_of(ctx):
            return super().parse_args(ctx, args)


def make_app(*, completion: bool = False) -> typer.Typer:
    """Return an empty app, to which `verb` and `add_family` add commands."""
    return typer.Typer(cls=Family, add_completion=completion, rich_markup_mode="rich", pretty_exceptions_enable=False)


def verb(
    app: typer.Typer, *examples: str, panel: str | None = None, name: str | None = None, long: bool = False
) -> Callable[[Function], Function]:
    """Register a function as a command; its docstring is the help text, and the examples follow the options.

    A `long` verb has the options --quiet and --verbose.
    """

    def register(function: Function) -> Function:
        command = app.command(
            name,
            cls=Verb,
            help=_unwrapped(function),
            epilog=epilog(*examples),
            rich_help_panel=panel,
        )
        command(_with_plugins(_with_volume(function) if long else function))
        return function

    return register


def _with_plugins(function: Function) -> Function:
    """Add the option --plugin of every verb to a function, which imports the plugins before the verb runs."""

    @wraps(function)
    def with_plugins(*arguments: Any, plugin: list[str] | None = None, **options: Any) -> None:
        if plugin:
            from greedynas.runtime.registry import load_plugin

            for name in plugin:
                load_plugin(name)
        function(*arguments, **options)

    help = "Import a module or a Python file that adds ops, samplers, searchers and so on. Can be given several times."
    annotation = Annotated[list[str] | None, option("--plugin", "MODULE", help, GENERAL)]
    added = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    signature = inspect.signature(function)
    with_plugins.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    with_plugins.__annotations__ = {**function.__annotations__, "plugin": annotation}
    return with_plugins  # type: ignore[return-value]


def _with_volume(function: Function) -> Function:
    """Add the options --quiet and --verbose to a verb."""

    @wraps(function)
    def with_volume(*arguments: Any, quiet: bool = False, verbose: bool = False, **options: Any) -> None:
        if quiet and verbose:
            raise GreedyNASError("--quiet and --verbose exclude each other: give one of them")
        volume.choose("quiet" if quiet else "verbose" if verbose else "normal")
        function(*arguments, **options)

    flags = {
        "quiet": "Print nothing but warnings, errors and what --json asks for.",
        "verbose": "Print the log as well, and progress every few seconds where there is no bar.",
    }
    signature = inspect.signature(function)
    annotations = {name: Annotated[bool, switch(f"--{name}", help, GENERAL)] for name, help in flags.items()}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    with_volume.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    with_volume.__annotations__ = {**function.__annotations__, **annotations}
    return with_volume  # type: ignore[return-value]


def add_family(app: typer.Typer, name: str, *examples: str, help: str, panel: str) -> typer.Typer:
    """Add a group of verbs, which shows its help when it is called without one of them, and return its app."""
    family = make_app()

    @family.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            say(context.get_help(), lines=True)

    app.add_typer(family, name=name, help=help, epilog=epilog(*examples), rich_help_panel=panel)
    return family


def option(flag: str, metavar: str, help: str, panel: str, *others: str, **more: Any) -> Any:
    """Declare an option that takes a value, in a panel of the help; `others` are further names of it."""
    return typer.Option(flag, *others, metavar=metavar, help=help, rich_help_panel=panel, **more)


def switch(flag: str, help: str, panel: str, **more: Any) -> Any:
    """Declare an option without a value, in a panel of the help."""
    return typer.Option(flag, help=help, rich_help_panel=panel, **more)


def epilog(*examples: str) -> str:
    """Return the end of a help text, with each example in a paragraph of its own."""
    return "\n\n".join(f"Example: {example}" for example in examples)


@contextmanager
def _errors_of(context: Any) -> Iterator[None]:
    """Add the command to errors that lack it, such as click's error for an option without a value."""
    try:
        yield
    except UsageError as error:
        if error.ctx is None:
            error.ctx = context
        raise


def _without_types(params: list[Any]) -> list[Any]:
    """Clear what typer would show as the type of a flag or an argument, such as `<list[Path]>`."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda **_: None  # only newer typer asks for it
    return params


def _unwrapped(function: Callable[..., None]) -> str:
    """Return the docstring with every paragraph in one line, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
