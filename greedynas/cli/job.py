"""Run the whole job: the verbs `run` and `demo`."""

from pathlib import Path
from typing import Annotated

from greedynas.cli.commands import make_app, option, verb
from greedynas.cli.options import (
    BUDGET,
    OUTPUT,
    BaseOption,
    CallbackOption,
    DataOption,
    DownloadOption,
    FlashOption,
    FlopsOption,
    JsonOption,
    LatencyOption,
    OutOption,
    ParamsOption,
    PresetArgument,
    RamOption,
    ScratchOption,
    SeedOption,
    SetOption,
    TaughtByOption,
    TrackOption,
    WeightsOption,
    pretrained_changes,
    print_json,
    shown_console,
    tracked,
)
from greedynas.runtime.errors import GreedyNASError

PANEL = "Whole job"
COMPARISON = "Comparison"

app = make_app()


@verb(
    app,
    "greedynas run auto --data photos/ --flops 5M --out runs/photos",
    "greedynas run auto --data photos/ --hours 2 --out runs/photos",
    "greedynas run auto --data photos/ --base fbnetc_100 --out runs/a",
    panel=PANEL,
    long=True,
)
def run(
    preset: PresetArgument,
    data: DataOption = None,
    out: OutOption = None,
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: Annotated[
        Path | None,
        option("--latency-table", "FILE", "Latency table for --latency. By default, this machine is measured.", BUDGET),
    ] = None,
    ram: RamOption = None,
    flash: FlashOption = None,
    hours: Annotated[float | None, option("--hours", "N", "Fit the whole job into this many hours.", BUDGET)] = None,
    baseline: Annotated[
        str | None,
        option(
            "--baseline",
            "NAME",
            "Fine-tune this pretrained timm model, to compare it with the network that is found.",
            COMPARISON,
        ),
    ] = None,
    baseline_weights: Annotated[
        Path | None,
        option("--baseline-weights", "FILE", "Weights of the baseline, if they are not in timm's cache.", COMPARISON),
    ] = None,
    base: BaseOption = None,
    weights: WeightsOption = None,
    teacher: TaughtByOption = None,
    scratch: ScratchOption = False,
    download: DownloadOption = False,
    settings: SetOption = None,
    callbacks: CallbackOption = None,
    track: TrackOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train, search, retrain, export and report in one command.

    For photographs, the preset auto searches around a pretrained network if its weights are on this machine.
    """
    from greedynas.jobs.job import Baseline, report_job, run_job
    from greedynas.jobs.resolving import settings_of
    from greedynas.settings.loading import parse_assignments
    from greedynas.spaces.budget import parse_limits

    if out is None:
        raise GreedyNASError("name the run directory with --out")
    if baseline_weights is not None and (baseline is None or not baseline_weights.is_file()):
        raise GreedyNASError("--baseline-weights takes a file, for the network that --baseline names")
    changes = parse_assignments(settings or []) | pretrained_changes(base, teacher, weights, scratch, download)
    changes |= {
        key: value
        for key, value in (("data.source", data), ("callbacks", tracked(callbacks, track)), ("seed", seed))
        if value is not None
    }
    console = shown_console(as_json)
    limits = {"macs": (flops, None), "params": (params, None), "latency_ms": (latency, None)}
    limits |= {"ram": (ram, None), "flash": (flash, None)}
    config, images = settings_of(preset, changes, out, console, parse_limits(limits), hours)
    beside = None if baseline is None else Baseline(baseline, str(baseline_weights or "cache"))
    result = run_job(config, out, limits, console, latency_table=latency_table, baseline=beside, data=images)
    if as_json:
        print_json(result)
    else:
        report_job(result, console)


@verb(app, "greedynas demo", "greedynas demo --out runs/demo", panel=PANEL, long=True)
def demo(
    out: Annotated[Path, option("--out", "DIR", "Write to this run directory.", OUTPUT)] = Path("greedynas-demo"),
) -> None:
    """Run the whole job on a Fashion-MNIST sample, in minutes on a CPU.

    The sample comes with greedynas; nothing is downloaded.
    """
    from greedynas.jobs.demo import run_demo

    run_demo(out, shown_console())
