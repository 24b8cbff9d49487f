"""Variants of greedy_vs_uniform on tuning seeds, before one of them is fixed and recorded on fresh ones.

    python benchmarks/greedy_vs_uniform_pilot.py PLAN.json OUT.jsonl JOBS SECONDS

The plan is a list of {"name": ..., "seeds": [...], "set": {"train.warmup": 0.1, ...}, "device": "cuda"} (or without a device:
cpu). First every variant's first seed, then every second one; what is finished after so many seconds is kept.
"""

import itertools
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from greedy_vs_uniform import pair


def main() -> None:
    plan, out, jobs, seconds = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), *map(int, sys.argv[3:])
    differences: dict[str, list[float]] = {}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    turns = itertools.zip_longest(*([(variant, seed) for seed in variant["seeds"]] for variant in plan))
    running: dict[Any, Any] = {
        pool.submit(pair, seed, variant["set"], variant.get("device", "cpu")): variant["name"]
        for variant, seed in filter(None, itertools.chain(*turns))
    }
    try:
        for done in as_completed(running, timeout=seconds):
            name, result = running[done], done.result()
            with out.open("a") as file:
                file.write(json.dumps({"name": name, **result}) + "\n")
            found = differences.setdefault(name, [])
            found.append(result["greedy"]["test_of_best"] - result["uniform"]["test_of_best"])
            print(f"{name:40s} {len(found)} seeds: {statistics.mean(found):+.4f}", flush=True)
    except TimeoutError:
        print("out of time")
    for process in list((pool._processes or {}).values()):  # not waited for: what runs now would not be finished
        process.kill()


if __name__ == "__main__":
    main()
