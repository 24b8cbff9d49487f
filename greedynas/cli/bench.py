"""Measure this machine: the verb `bench`."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.commands import make_app, option, verb
from greedynas.cli.options import DATA, OUTPUT, SETTINGS, JsonOption, SeedOption, print_json, shown_console
from greedynas.runtime.errors import GreedyNASError

DEVICES = ("auto", "cpu", "cuda")
MEASUREMENT = "Measurement"

app = make_app()


@verb(
    app,
    "greedynas bench mobilenet macro --out bench.json",
    "greedynas bench data --data photos/ --image-size 224",
    "greedynas bench cost --record bench.json",
    panel="Research",
)
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPACE",
            help="Search spaces (by default mobilenet, mobilenet-se and macro), or the word data, or the word cost.",
        ),
    ] = None,
    variants: Annotated[
        str | None,
        option(
            "--variants",
            "NAMES",
            "Some of toolkits, fp32, fp16, bf16, fp32-nhwc, bf16-nhwc, compiled, greedynas, joined by commas.",
            MEASUREMENT,
        ),
    ] = None,
    measures: Annotated[
        str | None,
        option("--measures", "NAMES", "Some of train, forward, filter, rank, data, joined by commas.", MEASUREMENT),
    ] = None,
    batch: Annotated[int | None, option("--batch", "N", "Images per training step.", MEASUREMENT, min=2)] = None,
    image_size: Annotated[
        int | None, option("--image-size", "N", "Height and width of the images.", MEASUREMENT, min=1)
    ] = None,
    steps: Annotated[int | None, option("--steps", "N", "Number of paths to run.", MEASUREMENT, min=1)] = None,
    seconds: Annotated[
        float | None,
        option(
            "--seconds",
            "N",
            "Time for each measurement; with data, for each reading of the images.",
            MEASUREMENT,
            min=0.01,
        ),
    ] = None,
    rounds: Annotated[
        int, option("--rounds", "N", "Measure all variants this often, in turn.", MEASUREMENT, min=1)
    ] = 1,
    total: Annotated[
        float | None, option("--total", "N", "Start no new measurement after this many seconds.", MEASUREMENT, min=0.01)
    ] = None,
    data: Annotated[
        str | None, option("--data", "SOURCE", "Load these images instead of synthetic ones.", DATA)
    ] = None,
    workers: Annotated[
        int | None, option("--workers", "N", "With data: number of processes that decode images.", DATA, min=0)
    ] = None,
    need: Annotated[
        float | None, option("--need", "N", "With data: images per second that training needs.", DATA, min=0.01)
    ] = None,
    record: Annotated[Path | None, option("--record", "FILE", "With cost: a record that --out wrote.", DATA)] = None,
    device: Annotated[str, option("--device", "NAME", "Device: auto, cpu or cuda.", SETTINGS)] = "auto",
    seed: SeedOption = None,
    out: Annotated[
        Path | None, option("--out", "FILE", "Write a record of all times to this JSON file.", OUTPUT)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure training, evaluation and data loading on this machine.

    Name search spaces to compare several ways of running their supernets. With the word data, check whether images can
    be loaded as fast as training needs them. With the word cost, estimate the paper's ImageNet training from a record.
    """
    names = what or []
    if device not in DEVICES:
        raise GreedyNASError(f"--device takes {', '.join(DEVICES)}, got {device!r}")
    if names[:1] == ["cost"]:
        _refuse_more(names)
        _cost(record, as_json)
    elif names[:1] == ["data"]:
        _refuse_more(names)
        _data(data, image_size or 224, workers, seconds or 10.0, need, device, out, as_json)
    else:
        from greedynas.bench.benchmark import BenchSettings, run_bench
        from greedynas.bench.tables import show_bench

        settings = BenchSettings(
            batch=batch,
            image_size=image_size,
            steps=steps,
            seconds=seconds,
            total=total,
            variants=_names(variants),
            measures=_names(measures),
            data=data,
            device=device,
            seed=seed or 0,
            rounds=rounds,
        )
        console = shown_console(as_json)
        found = run_bench(names, settings, console, out)
        if as_json:
            print_json(found)
        else:
            show_bench(found, console)


def _names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _refuse_more(names: list[str]) -> None:
    """Raise GreedyNASError if search spaces follow the word data or cost."""
    if len(names) > 1:
        raise GreedyNASError(f"bench {names[0]} takes no spaces, got {' '.join(names[1:])}")


def _data(
    source: str | None,
    image_size: int,
    workers: int | None,
    seconds: float,
    need: float | None,
    device_name: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare the speed of loading images with what training needs."""
    from greedynas.bench.benchmark import measured_need
    from greedynas.bench.cost import recorded_need
    from greedynas.bench.data import Need, check_source, feed_facts, measure_feed, show_feed
    from greedynas.runtime.devices import choose_device
    from greedynas.runtime.files import write_json

    device = choose_device(device_name)
    console = shown_console(as_json)
    with console.status("reading images"):
        feed = measure_feed(check_source(source), image_size, workers, seconds, device)
    if need is not None:
        needed = Need(need, "given")
    elif device.type == "cuda" or (recorded := recorded_need(image_size)) is None:
        with console.status("training"):
            needed = measured_need(image_size, min(seconds, 5.0), device)
    else:
        needed = recorded
    facts = feed_facts(feed, needed)
    if out is not None:
        write_json(out, facts)
    if as_json:
        print_json(facts)
    else:
        show_feed(feed, needed, console)


def _cost(record: Path | None, as_json: bool) -> None:
    """Show what the paper's ImageNet training would cost by a record."""
    from greedynas.bench.cost import cost_facts, read_record, show_cost

    if record is None:
        raise GreedyNASError("name a record with --record: greedynas bench mobilenet --out FILE writes one")
    found = read_record(record)
    if as_json:
        print_json(cost_facts(found))
    else:
        show_cost(found, shown_console())
