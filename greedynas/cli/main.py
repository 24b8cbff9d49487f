"""Assemble the command line and run it; wrong input leads to one line on stderr and exit code 2."""

import logging
import os
import re
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from greedynas.cli import bench, hub, inspect, job, runs, stages, studies, volume
from greedynas.cli.commands import UsageError, epilog, make_app
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.signals import Stopped, signals_caught
from greedynas.runtime.terminal import complain, say, steady_streams

PROGRAM = "greedynas"
# Dependencies that only some verbs import: a verb names the one that is missing. Maps the imported name to that of pip.
PACKAGES = {
    name: name
    for name in ("jinja2", "onnx", "onnxruntime", "onnxscript", "plotly", "pymoo", "scipy", "timm", "torchvision")
}

app = make_app(completion=True)
for family in (job, stages, runs, hub, inspect, studies, bench):  # in the order of the help
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
    """Run the command line; every expected failure leads to one line and exit code 2."""
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
    except OSError as error:  # only of the streams
        _fail(f"{error.filename}: {error.strerror}; its output is incomplete, everything else is done")


def _run() -> NoReturn:
    """Run the command line and exit, with one line for every expected failure."""
    _show_warnings()
    try:
        volume.choose("normal")
        with signals_caught(), _ranks():
            code = _call_app()
    except GreedyNASError as error:
        _fail(str(error))
    except UsageError as error:
        _fail(_describe_usage_error(error))
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
    except (OSError, MemoryError) as error:  # caused by the machine: a full disk, a file that may not be read
        _fail(_describe_machine_error(error))
    sys.exit(code if isinstance(code, int) else 0)


def _call_app() -> object:
    """Run the verb, and convert RuntimeErrors of PyTorch that the machine causes."""
    if not Path(__file__).is_file():  # spaces, presets and the sample are files of the package
        raise GreedyNASError("greedynas cannot be used from inside of a zip file or a wheel: install it with pip")
    try:
        return app(standalone_mode=False, prog_name=PROGRAM)
    except RuntimeError as error:
        if "DataLoader worker" in str(error):
            raise GreedyNASError(
                f"a process that reads images has ended ({str(error).partition(chr(10))[0]:.200}): if memory is short, "
                "lower data.workers or data.memory_gb; checkpoints are kept, and the same command resumes from there"
            ) from None
        if "can't allocate memory" in str(error):  # PyTorch on a CPU
            raise MemoryError from None
        raise


def _ranks() -> AbstractContextManager[None]:
    """Join the ranks that torchrun has started, if there are any."""
    if "WORLD_SIZE" not in os.environ:
        return nullcontext()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise it warns of every connection that ends
    import shlex

    import torch

    from greedynas._version import __version__
    from greedynas.runtime.parallel.ranks import ranks

    versions = {"version of greedynas": __version__, "version of PyTorch": torch.__version__}
    return ranks({**versions, "command": shlex.join(sys.argv[1:])})


def _show_warnings() -> None:
    """Show logged warnings, such as a damaged checkpoint or a skipped image, on stderr as well."""
    warnings.filterwarnings("ignore", module="PIL")  # about unusual image files; unreadable ones are reported anyway
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("greedynas").addHandler(handler)


def _describe_usage_error(error: Any) -> str:
    """Return the message for a malformed command, which names the command's own help."""
    message = error.format_message().rstrip(".")
    message = re.sub(r"\.? Did you mean (.+)\?$", r" (did you mean \1?)", message)
    message = re.sub(r"\(Possible options: (.+)\)$", r"(did you mean \1?)", message)
    command = PROGRAM if error.ctx is None else error.ctx.command_path
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _describe_machine_error(error: OSError | MemoryError) -> str:
    """Return the message for an error that the machine caused."""
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; nothing is lost: fix this and repeat the command"


def _fail(message: str) -> NoReturn:
    """Print an error in one line and exit with code 2."""
    line = " ".join(message.split())
    complain(f"error: {line}")
    sys.exit(2)
