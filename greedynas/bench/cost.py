"""`greedynas bench cost`: the cost of the paper's ImageNet supernet at the rates that a benchmark measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from greedynas.bench.data import Need
from greedynas.bench.variants import VARIANTS
from greedynas.greedy.schedule import PAPER_RATIO, Schedule, corrected_images
from greedynas.jobs.resolving import load_config
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_json
from greedynas.runtime.text import count, duration

PRESETS = {"mobilenet": "imagenet", "mobilenet-se": "imagenet-se"}
PAPER = {"optimization": 1.23e6 * 46, "evaluation": 2.40e6 * 46}  # the supplement's example: 89.7M corrected

RECORDED = Path(__file__).parent / "recorded.json"  # training rates of one GPU, by benchmarks/scripts/record_bench.py


@dataclass(frozen=True)
class Rates:
    """The images per second of one variant."""

    label: str
    training: float
    filtering: float  # evaluation images, each image counted for each path

    @property
    def ratio(self) -> float:
        """The measured cost of a training step in forward passes of the same number of images."""
        return self.filtering / self.training


@dataclass(frozen=True)
class Supernet:
    """The training of a supernet in numbers of images, and its cost."""

    name: str
    optimization: float
    evaluation: float
    filter_images: float  # validation images that are read for filtering

    @property
    def corrected(self) -> float:
        return corrected_images(self.optimization, self.evaluation)

    def seconds(self, rates: Rates) -> float:
        return self.optimization / rates.training + self.evaluation / rates.filtering

    def delivery(self, rates: Rates) -> float:
        """Return the average images per second that the data loader must deliver, for training and for filtering."""
        return (self.optimization + self.filter_images) / self.seconds(rates)


def read_record(file: Path) -> dict[str, Any]:
    """Return the record that `greedynas bench --out` wrote."""
    if not file.is_file():
        raise GreedyNASError(f"no such record: {file}; make one with greedynas bench --out {file}")
    found = read_json(file)
    if not isinstance(found.get("spaces"), dict) or "machine" not in found:
        raise GreedyNASError(f"{file} is no record of greedynas bench")
    return found


def rates_in(record: dict[str, Any], space: str) -> dict[str, Rates]:
    """Return the rates of the variants that were measured in both training and filtering, by name."""
    measured: dict[str, dict[str, float]] = {}
    for row in record["spaces"].get(space, {}).get("rows", []):
        if row.get("images_per_second"):
            measured.setdefault(row["variant"], {})[row["measure"]] = row["images_per_second"]
    return {
        variant.name: Rates(variant.label, found["train"], found["filter"])
        for variant in VARIANTS
        if {"train", "filter"} <= (found := measured.get(variant.name, {})).keys()
    }


def slowest_loader(record: dict[str, Any], space: str) -> tuple[str, float] | None:
    """Return the label and the images per second of the slowest way to read images in the record of a space."""
    rows = record["spaces"][space].get("data", [])
    rates = [(row["label"], row["images_per_second"]) for row in rows if row.get("images_per_second")]
    return min(rates, key=lambda rate: rate[1], default=None)


def imagenet_supernets(space: str) -> tuple[Supernet, ...]:
    """Return the paper's own count, and our preset's prediction up to the epoch where the paper stopped and at most."""
    config = load_config(PRESETS[space])
    assert config.expect is not None
    settings = config.train
    schedule = Schedule(settings, config.expect.train_images)
    found = [Supernet("the paper's count, no warm-up", **PAPER, filter_images=PAPER["evaluation"] / settings.m)]
    for name, epochs in (("preset", config.expect.epochs), ("preset, if it never stops early", settings.max_epochs)):
        optimization, evaluation = schedule.predicted_images(epochs)
        name = f"{name}, {epochs} epochs"
        found.append(Supernet(name, optimization, evaluation, evaluation / settings.m))
    return tuple(found)


def cost_facts(record: dict[str, Any]) -> dict[str, Any]:
    """Return the costs as JSON for every recorded space that the paper trains on ImageNet."""
    spaces = {}
    for space in PRESETS:
        rates = rates_in(record, space)
        if not rates or record["spaces"][space]["image_size"] != 224:
            continue
        spaces[space] = [
            {
                "supernet": supernet.name,
                "variant": variant,
                "optimization_images": supernet.optimization,
                "evaluation_images": supernet.evaluation,
                "corrected_images": supernet.corrected,
                "hours": supernet.seconds(found) / 3600,
                "measured_ratio": found.ratio,
                "training_images_per_second": found.training,
                "average_images_per_second": supernet.delivery(found),
            }
            for supernet in imagenet_supernets(space)
            for variant, found in rates.items()
        ]
    if not spaces:
        raise GreedyNASError(
            f"the record has no training and filtering of {' or '.join(PRESETS)} at 224 px; measure them with "
            "greedynas bench mobilenet --image-size 224 --out FILE"
        )
    return {"schema_version": 1, "machine": record["machine"]["name"], "spaces": spaces}


def cost_tables(record: dict[str, Any]) -> list[Table]:
    facts = cost_facts(record)
    tables = []
    for space, rows in facts["spaces"].items():
        table = Table(title=Text(f"ImageNet, {space}, on {facts['machine']}"), title_justify="left")
        table.add_column("supernet")
        for column in ("optimization", "evaluation", f"corrected (r = {PAPER_RATIO})"):
            table.add_column(column, justify="right")
        table.add_column("run as")
        for column in ("measured r", "time", "training takes images/s", "on average"):
            table.add_column(column, justify="right")
        labels = {variant.name: variant.label for variant in VARIANTS}
        previous = None
        for row in rows:
            images = [row[f"{kind}_images"] for kind in ("optimization", "evaluation", "corrected")]
            first = [row["supernet"], *(f"{number / 1e6:.1f}M" for number in images)]
            table.add_row(
                *(first if row["supernet"] != previous else [""] * len(first)),
                labels[row["variant"]],
                f"{row['measured_ratio']:.2f}",
                duration(3600 * row["hours"]),
                f"{row['training_images_per_second']:,.0f}",
                f"{row['average_images_per_second']:,.0f}",
            )
            previous = row["supernet"]
        tables.append(table)
    return tables


def show_cost(record: dict[str, Any], console: Console) -> None:
    for table in cost_tables(record):
        console.print(table)
    facts = cost_facts(record)
    for space, rows in facts["spaces"].items():
        ours = next(
            (row for row in rows if row["variant"] == "greedynas" and row["supernet"].startswith("preset")), None
        )
        if ours is not None:
            console.print(
                f"{space}: {count(ours['corrected_images'])} corrected images in {duration(3600 * ours['hours'])}. While it "
                f"trains, the data loader must deliver {ours['training_images_per_second']:,.0f} images/s; greedynas bench "
                f"data shows whether yours can.{_too_slow(record, space, ours)}",
                highlight=False,
            )


def _too_slow(record: dict[str, Any], space: str, ours: dict[str, Any]) -> str:
    """Return a sentence about the record's own loader if training would wait for it, else an empty text."""
    loader = slowest_loader(record, space)
    if loader is None or loader[1] >= ours["training_images_per_second"]:
        return ""
    label, rate = loader
    alone = duration(ours["optimization_images"] / rate)
    return f" The loader of this record ({label}) delivered {rate:,.0f}: {alone} for the training images alone."


def recorded_need(image_size: int) -> Need | None:
    """Return the rate of training on the recorded machine, for use where this machine's own is unknown."""
    space = "macro" if image_size <= 64 else "mobilenet"
    recorded = read_json(RECORDED)
    rate = recorded.get("training_images_per_second", {}).get(space)
    return None if rate is None else Need(rate, f"{space} on one {recorded['machine']}, recorded")


def training_rates(record: dict[str, Any]) -> dict[str, Any]:
    """Return the training rates of a record in the form that `recorded_need` reads."""
    rates = {
        space: round(row["images_per_second"])
        for space, facts in record["spaces"].items()
        for row in facts["rows"]
        if (row["measure"], row["variant"]) == ("train", "greedynas") and row.get("images_per_second")
    }
    return {"machine": record["machine"]["name"], "training_images_per_second": rates}
