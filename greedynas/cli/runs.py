"""See and manage runs: the verbs `runs`, `status`, `compare`, `rm`, `watch` and `doctor`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.commands import make_app, option, switch, verb
from greedynas.cli.options import OUTPUT, JsonOption, RunArgument, print_json, shown_console
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import ask, complain, say

PANEL = "Runs"

app = make_app()

RunsArgument = Annotated[list[Path], typer.Argument(metavar="DIR", help="Run directories.")]


@verb(app, "greedynas runs", "greedynas runs experiments/ --json", panel=PANEL)
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with run directories, also in subfolders.")
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """List runs with their progress, accuracy and size.

    A run that cannot be read is listed with the reason.
    """
    from greedynas.monitoring.status import show_runs, statuses, to_json

    found = statuses(folder)
    if as_json:
        print_json({"folder": str(folder), "runs": to_json(found)})
    else:
        show_runs(found, folder, shown_console())


@verb(app, "greedynas status runs/photos", panel=PANEL)
def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show how far a run is, also while it is running.

    Nothing is written, and the running command is not disturbed.
    """
    from greedynas.monitoring.status import show_status, status_of, to_json

    found = status_of(run)
    if as_json:
        print_json(to_json([found])[0])
    else:
        show_status(found, shown_console())


@verb(app, "greedynas compare runs/photos runs/photos-se", "greedynas compare runs/a runs/b --no-page", panel=PANEL)
def compare(
    runs: RunsArgument,
    out: Annotated[Path, option("--out", "FILE", "Write the page to this file.", OUTPUT, dir_okay=False)] = Path(
        "comparison.html"
    ),
    page: Annotated[bool, switch("--page/--no-page", "Write a page with the fronts of all runs.", OUTPUT)] = True,
    as_json: JsonOption = False,
) -> None:
    """Compare runs in a table and on one page.

    The page has the fronts of all runs on one picture, their tested networks, and their training losses."""
    from greedynas.reporting import check_packages

    check_packages()
    from greedynas.monitoring.comparison import (
        comparison_facts,
        comparison_table,
        read_compared,
        remarks,
        write_comparison,
    )
    from greedynas.reporting.cells import rich_table

    found = read_compared(runs)
    file = write_comparison(found, out) if page else None
    if as_json:
        print_json(
            {
                "runs": comparison_facts(found),
                "remarks": remarks(found),
                "page": None if file is None else str(file),
            }
        )
        return
    console = shown_console()
    console.print(rich_table(comparison_table(found)))
    if file is not None:
        console.print(f"Page: {file} (opens in any browser)", highlight=False, markup=False)


@verb(app, "greedynas rm runs/old", "greedynas rm runs/old runs/older --yes", panel=PANEL)
def rm(
    runs: RunsArgument,
    yes: Annotated[bool, switch("--yes", "Do not ask.", OUTPUT)] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove runs, after a question.

    A folder is removed, with all that is in its subfolders, only if greedynas has written everything at its top and no
    process works on it.
    """
    from greedynas.monitoring.removal import check_removable, remove_run
    from greedynas.monitoring.status import size_of
    from greedynas.runtime.text import size

    for run in runs:
        check_removable(run)
    if not yes and not sys.stdin.isatty():
        raise GreedyNASError("rm asks before it removes anything, and there is no terminal to ask on: add --yes")
    removed = []
    for run in runs:
        amount = size_of(run)
        if not yes and not ask(f"Remove {run} ({size(amount)})? [y/N] "):
            continue
        remove_run(run)
        removed.append({"run": str(run), "bytes": amount})
        if not as_json:
            say(f"removed {run} ({size(amount)})")
    if as_json:
        print_json({"removed": removed})


@verb(app, "greedynas watch runs/photos", "greedynas watch runs/photos --port 8000", panel=PANEL)
def watch(
    run: RunArgument,
    port: Annotated[
        int, option("--port", "N", "Port on this machine. By default, any free one.", OUTPUT, min=0, max=65535)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Serve a live page of a run on this machine.

    The page has the charts of the report and stays current while the run is running. It can be opened only from this
    machine and only with the printed address, which contains a token.
    """
    from greedynas.reporting import check_packages

    check_packages()
    from greedynas.monitoring.live_page import LiveServer
    from greedynas.runtime.signals import Stopped

    with LiveServer(run, port) as server:
        if as_json:
            print_json({"run": str(run), "address": server.address})
        else:
            say(f"Watching {run} at {server.address} (Ctrl-C to end)")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except Stopped:
            complain("the live page has ended; the run is not affected")


@verb(app, "greedynas doctor", "greedynas doctor --out runs/", panel=PANEL)
def doctor(
    out: Annotated[Path, option("--out", "DIR", "The folder in which runs are to be written.", OUTPUT)] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Check what this machine has for greedynas.

    Versions, processor, GPU, precisions, threads, memory, disk and extras are shown; what is missing comes with the command
    that installs it.
    """
    from greedynas.monitoring.doctor import examine, findings_json, show_findings

    found = examine(out)
    if as_json:
        print_json(findings_json(found))
    else:
        show_findings(found, shown_console())
