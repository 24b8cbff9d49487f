"""Make a record of `greedynas bench --out` from a GPU the one that the documentation and `bench data` quote.

    python benchmarks/scripts/record_bench.py bench.json bench-h200-DATE

Writes bench.json and bench.txt to that folder of benchmarks/records, greedynas/bench/recorded.json, and the worked
example in docs/results/speed.md. The other figures in docs/results/speed.md and docs/results/engine.md are written by
hand.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from greedynas.bench.cost import RECORDED, read_record, show_cost, training_rates
from greedynas.bench.tables import show_bench

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- cost: written by benchmarks/scripts/record_bench.py -->\n", "<!-- end of cost -->"


def printed(show, record):
    console = Console(width=140, record=True, quiet=False, file=sys.stderr)
    show(record, console)
    return "\n".join(line.rstrip() for line in console.export_text().strip().splitlines()) + "\n"


def main():
    record = read_record(Path(sys.argv[1]))
    folder = Path("benchmarks", "records", sys.argv[2])
    (ROOT / folder).mkdir(exist_ok=True)
    (ROOT / folder / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    (ROOT / folder / "bench.txt").write_text(printed(show_bench, record))
    RECORDED.write_text(json.dumps(training_rates(record), indent=1) + "\n")
    page = ROOT / "docs" / "results" / "speed.md"
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    command = f"$ greedynas bench cost --record {folder.as_posix()}/bench.json\n"
    page.write_text(f"{before}{BEGIN}```console\n{command}{printed(show_cost, record)}```\n{END}{after}")


if __name__ == "__main__":
    main()
