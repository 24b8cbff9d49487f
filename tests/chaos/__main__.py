"""Inject all faults and print a table of the outcomes.

    python -m tests.chaos [--few] [--out FOLDER] [--seed N] [FAULT …]

Every trial must end in a resumed run with the result of an undisturbed one, if necessary after a one-line error and a
failing exit code. FAULT selects faults by words of their names. With --out, chaos.txt and chaos.json are written to the
folder.
"""

import argparse
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS, FEW, CannotStage
from tests.chaos.workshop import Workshop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--few", action="store_true", help="inject only the cheapest faults, as in the normal tests")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    faults = {**FAULTS, **{name: (FAULTS[name][0], trials) for name, trials in FEW.items()}} if options.few else FAULTS
    chosen = {name: fault for name, fault in faults.items() if all(word in name for word in options.faults)}
    chosen = {name: fault for name, fault in chosen.items() if name in FEW or not options.few}
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        shop = Workshop(Path(root))
        for name, (stage, trials) in chosen.items():
            rows.append({"fault": name, **outcome_of(lambda: stage(shop, trials, random.Random(options.seed)))})  # noqa: B023
            print(line(rows[-1]), flush=True)
    text = summary(rows, options.seed, time.monotonic() - start)
    print(text.splitlines()[-1])
    if options.out is not None:
        (options.out / "chaos.txt").write_text(text)
        facts = {"seed": options.seed, "seconds": round(time.monotonic() - start), "faults": rows}
        (options.out / "chaos.json").write_text(json.dumps(facts, indent=1) + "\n")
    return any(row["outcome"].startswith("LOST") for row in rows)


def outcome_of(stage: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        trials, outcome = stage(), "nothing lost"
    except CannotStage as why:
        trials, outcome = 0, f"cannot be staged here: {why}"
    except Exception as error:
        trials, outcome = 0, f"LOST: {type(error).__name__}: {error}"
    return {"trials": trials, "outcome": outcome, "seconds": round(time.monotonic() - start, 1)}


def line(row: dict[str, Any]) -> str:
    return f"{row['fault']:40} {row['trials']:6} {row['seconds']:8.1f} s  {row['outcome']}"


def summary(rows: list[dict[str, Any]], seed: int, seconds: float) -> str:
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    head = f"make chaos: seed {seed}, {machine}\n{'fault':40} {'trials':>6} {'time':>10}  outcome\n"
    lost = sum(row["outcome"].startswith("LOST") for row in rows)
    trials = sum(row["trials"] for row in rows)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    end = f"{trials} trials of {len(rows)} faults in {seconds:.0f} s ({cpu:.0f} s of CPU), {lost} faults with losses\n"
    return head + "".join(line(row) + "\n" for row in rows) + end


if __name__ == "__main__":
    sys.exit(main())
