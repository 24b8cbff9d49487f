"""Assemble the command line and run it: wrong input is one line on stderr and exit code 2."""

import logging
import os
import re
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from greedynas.cli import bench, inspect, job, stages, studies
from greedynas.cli.commands import UsageError, epilog, make_app
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.signals import Stopped, signals_caught
from greedynas.runtime.terminal import complain, say, steady_streams

# OpenMP's threads wait for each other by spinning. Beside any other busy process on a small machine that made training a
# hundred times slower (2,200 ms a step instead of 18, on 2 cores); after few turns they sleep instead, for 20% when alone.
# Read when torch is loaded, which is later.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

PROGRAM = "greedynas"
# Dependencies that only some verbs import: where somebody has left one out, the verb says so. By the name that is imported,
# what pip installs.
PACKAGES = {
    name: name
    for name in ("jinja2", "onnx", "onnxruntime", "onnxscript", "plotly", "pymoo", "scipy", "timm", "torchvision")
}

app = make_app(completion=True)
for family in (job, stages, inspect, studies, bench):  # in the order of the help
    app.add_typer(family.app)


@app.callback(
    invoke_without_command=True,
    epilog=epilog("greedynas run auto --data photos/ --flops 5M --out runs/photos")
    + "\n\nEvery command has its own help, such as greedynas search --help. For shell completion, run greedynas "
    "--install-completion.",
)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Find a small image classifier for your data and hardware budget, by one-shot search with a greedy supernet."""
    if version:
        from greedynas._version import __version__

        say(__version__)
    elif context.invoked_subcommand is None:
        say(context.get_help(), lines=True)


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
    """Run the command line on streams that do not raise."""
    try:
        with steady_streams():
            _run()
    except OSError as error:  # of the streams alone
        _fail(f"{error.filename}: {error.strerror}; what was written there is not complete, all else is done")


def _run() -> NoReturn:
    """Run the command line and exit, with one line for every expected failure."""
    _show_warnings()
    try:
        with signals_caught(), _ranks():
            code = _call_app()
    except GreedyNASError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(_told_usage(error))
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            complain(str(stopped))
        sys.exit(stopped.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped")
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        _fail(f"greedynas needs {error.name}, which is not installed: pip install {PACKAGES[error.name]}")
    except (OSError, MemoryError) as error:  # the machine's: a full disk, a file that may not be read
        _fail(_told(error))
    sys.exit(code if isinstance(code, int) else 0)


def _call_app() -> object:
    """Run the verb; what PyTorch reports as a RuntimeError, but is the machine's doing, becomes a line."""
    if not Path(__file__).is_file():  # spaces, presets and the sample are files beside this one
        raise GreedyNASError("greedynas cannot be used from inside of a zip file or a wheel: install that with pip")
    try:
        return app(standalone_mode=False, prog_name=PROGRAM)
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
    """Join the ranks that torchrun started, if it did."""
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
    """Show what goes wrong without stopping the work (a damaged checkpoint, a skipped image) as well as logging it."""
    warnings.filterwarnings("ignore", module="PIL")  # of strange image files; those that cannot be read are told anyway
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("greedynas").addHandler(handler)


def _told_usage(error: Any) -> str:
    """Return what is wrong with a command, and where its own help is."""
    message = error.format_message().rstrip(".")
    message = re.sub(r"\.? Did you mean (.+)\?$", r" (did you mean \1?)", message)
    message = re.sub(r"\(Possible options: (.+)\)$", r"(did you mean \1?)", message)
    command = PROGRAM if error.ctx is None else error.ctx.command_path
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _told(error: OSError | MemoryError) -> str:
    """Return what is wrong with the machine."""
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; nothing is lost: put that right, and give the same command again"


def _fail(message: str) -> NoReturn:
    """Print an error in one line, and exit with code 2."""
    line = " ".join(message.split())
    complain(f"error: {line}")
    sys.exit(2)
