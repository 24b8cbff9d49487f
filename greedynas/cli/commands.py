"""Define how verbs are declared, and how their help looks: panels, examples, and no type beside a flag."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from greedynas.runtime.terminal import say

# Newer typer brings its own click, older typer uses the installed one: ask typer which.
UsageError: Any = typer.BadParameter.__base__

GENERAL = "General"  # the panel of --json and --help

Function = TypeVar("Function", bound=Callable[..., None])


class Verb(TyperCommand):
    """Show a command's help without types beside flags and braces around arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, of which --help is in the last panel."""
        params = _without_flag_types(super().get_params(ctx))
        for param in params:
            if param.name == "help":
                param.rich_help_panel = GENERAL
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; every error knows its command."""
        with _errors_of(ctx):
            return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with a required argument written as DIR instead of {DIR}."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Family(TyperGroup):
    """Show a group's help without types beside flags, and without the two options for shell completion."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; the epilog of the main help names the hidden ones."""
        params = _without_flag_types(super().get_params(ctx))
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.hidden = True
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; every error knows its command."""
        with _errors_of(ctx):
            return super().parse_args(ctx, args)


def make_app(*, completion: bool = False) -> typer.Typer:
    """Return an empty app, to which `verb` and `add_family` add commands."""
    return typer.Typer(cls=Family, add_completion=completion, rich_markup_mode="rich", pretty_exceptions_enable=False)


def verb(
    app: typer.Typer, *examples: str, panel: str | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Register a function as a command; its docstring is the help text, and the examples follow the options."""

    def register(function: Function) -> Function:
        command = app.command(
            name,
            cls=Verb,
            help=_unwrapped(function),
            epilog=epilog(*examples),
            rich_help_panel=panel,
        )
        command(_with_plugins(function))
        return function

    return register


def _with_plugins(function: Function) -> Function:
    """Return the function with an option --plugin, which every verb has: plugins are imported before the verb runs."""

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


def add_family(app: typer.Typer, name: str, *examples: str, help: str, panel: str) -> typer.Typer:
    """Add a group of verbs, which shows its help when it is called without one of them, and return its app."""
    family = make_app()

    @family.callback(invoke_without_command=True)
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            say(context.get_help(), lines=True)

    app.add_typer(family, name=name, help=help, epilog=epilog(*examples), rich_help_panel=panel)
    return family


def option(flag: str, metavar: str, help: str, panel: str, **more: Any) -> Any:
    """Declare an option that takes a value, in a panel of the help."""
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel, **more)


def switch(flag: str, help: str, panel: str, **more: Any) -> Any:
    """Declare an option without a value, in a panel of the help."""
    return typer.Option(flag, help=help, rich_help_panel=panel, **more)


def epilog(*examples: str) -> str:
    """Return the end of a help text, with each example in a paragraph of its own."""
    return "\n\n".join(f"Example: {example}" for example in examples)


@contextmanager
def _errors_of(context: Any) -> Iterator[None]:
    """Add the command to errors that lack it: click's parser leaves it out where an option has no value."""
    try:
        yield
    except UsageError as error:
        if error.ctx is None:
            error.ctx = context
        raise


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Clear what typer would show as the type of a flag."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _unwrapped(function: Callable[..., None]) -> str:
    """Return the docstring with every paragraph in one line, for the terminal to wrap."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
