"""The verb `bench`: ways to run a supernet side by side, whether data can keep up, and what the paper's job would cost."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.options import JsonOption, SeedOption, app, print_json, shown_console
from greedynas.runtime.errors import GreedyNASError

EXAMPLES = (
    "Example: greedynas bench mobilenet macro --out bench.json · greedynas bench data --data photos/ --image-size 224 · "
    "greedynas bench cost --record bench.json"
)
DEVICES = ("auto", "cpu", "cuda")


@app.command(epilog=EXAMPLES)
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Spaces (mobilenet, mobilenet-se, macro if none is named); or: data; or: cost."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=2, help="Images of a training step.")] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", min=1, help="Height and width.")] = None,
    variants: Annotated[
        str | None, typer.Option("--variants", help="fp32,fp16,bf16,bf16-nhwc,compiled,greedynas: some of them.")
    ] = None,
    measures: Annotated[
        str | None, typer.Option("--measures", help="train,forward,filter,rank,data: some of them.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Paths that are run.")] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.01, help="For one measure of one variant; of data: each reading.")
    ] = None,
    total: Annotated[
        float | None, typer.Option("--total", min=0.01, help="Begin nothing more after so many seconds.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Images of your own for the data loader.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="data: processes that decode.")] = None,
    need: Annotated[float | None, typer.Option("--need", min=0.01, help="data: images/s that training takes.")] = None,
    record: Annotated[Path | None, typer.Option("--record", help="cost: what --out wrote.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    seed: SeedOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the record into this file (JSON).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: training and evaluation of supernets in several ways, data loading, the cost of ImageNet."""
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
        )
        console = shown_console(as_json)
        found = run_bench(names, settings, console, out)
        if as_json:
            print_json(found)
        else:
            show_bench(found, console)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _refuse_more(names: list[str]) -> None:
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
    from greedynas.bench.cost import cost_facts, read_record, show_cost

    if record is None:
        raise GreedyNASError("name a record with --record: greedynas bench mobilenet --out FILE writes one")
    found = read_record(record)
    if as_json:
        print_json(cost_facts(found))
    else:
        show_cost(found, shown_console())
