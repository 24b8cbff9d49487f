"""`greedynas study methods` and `greedynas study ablation`: supernets that compete."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from greedynas.cli.options import (
    DataOption,
    FlopsOption,
    JsonOption,
    LatencyOption,
    LatencyTableOption,
    ParamsOption,
    SetOption,
    print_json,
    shown_console,
)
from greedynas.cli.studies import JobsOption, StudyOut, study_app
from greedynas.runtime.errors import GreedyNASError

if TYPE_CHECKING:
    from greedynas.spaces.budget import Budget

ConfigArgument = Annotated[
    str, typer.Argument(help="A preset (fashion, cifar10, imagenet, imagenet-se), a YAML file, or a run directory.")
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, max=1000, help="How many supernets of each kind.")]
FirstSeedOption = Annotated[int, typer.Option("--first-seed", min=0, help="The first of their seeds.")]
RetrainSeedsOption = Annotated[
    int, typer.Option("--retrain-seeds", min=1, max=1000, help="Trainings of each found network.")
]
TruthOption = Annotated[
    Path | None, typer.Option("--truth", help="NAS-Bench-Macro's JSON file: stands in for retraining (space macro).")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Minutes on a CPU with the fashion preset, two seeds.")]
KeepOption = Annotated[bool, typer.Option("--keep/--no-keep", help="Keep supernets and trained networks.")]


@study_app.command(epilog="Example: greedynas study methods fashion --flops 800K --seeds 5 --out study-methods")
def methods(
    config: ConfigArgument,
    data: DataOption = None,
    out: StudyOut = Path("study-methods"),
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    chosen: Annotated[
        list[str] | None,
        typer.Option("--method", help="random, uniform, uniform-E, fair, greedy (these if not given), fair-E."),
    ] = None,
    searchers: Annotated[
        list[str] | None, typer.Option("--searcher", help="random or evolution; both if not given.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", help="Corrected cost of uniform and fair, in epochs of plain training."),
    ] = None,
    seeds: SeedsOption = 3,
    first_seed: FirstSeedOption = 0,
    retrain_seeds: RetrainSeedsOption = 1,
    systematic: Annotated[
        int,
        typer.Option("--systematic", min=0, help="Retrain so many paths at equal steps of each search; 30 at least."),
    ] = 0,
    truth: TruthOption = None,
    quick: QuickOption = False,
    keep: KeepOption = True,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tables 1 and 6: what do uniform, fair and greedy supernets find, at which cost?

    --set key=value changes all methods, --set uniform.key=value one of them.
    """
    from greedynas.studies.methods.run import METHODS, SEARCHERS, MethodsOptions, study_methods
    from greedynas.studies.methods.run import quick as quickly

    options = MethodsOptions(
        preset=config,
        changes=_changes(settings, data),
        budget=_budget(flops, params, latency),
        seeds=tuple(range(first_seed, first_seed + seeds)),
        retrain_seeds=retrain_seeds,
        latency_table=latency_table,
        truth=truth,
        keep=keep,
        jobs=jobs,
        methods=tuple(dict.fromkeys(chosen or METHODS)),
        searchers=tuple(dict.fromkeys(searchers or SEARCHERS)),
        epochs=epochs,
        systematic=systematic,
    )
    result = study_methods(out, quickly(options) if quick else options, shown_console(as_json))
    if as_json:
        print_json(result)


@study_app.command(epilog="Example: greedynas study ablation fashion --flops 800K --seeds 5 --out study-ablation")
def ablation(
    config: ConfigArgument,
    data: DataOption = None,
    out: StudyOut = Path("study-ablation"),
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    seeds: SeedsOption = 3,
    first_seed: FirstSeedOption = 0,
    retrain_seeds: RetrainSeedsOption = 1,
    truth: TruthOption = None,
    quick: QuickOption = False,
    keep: KeepOption = True,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Table 4: filtering and the three uses of the pool, each on and off, Net1 to Net6."""
    from greedynas.studies.ablation.run import quick as quickly
    from greedynas.studies.ablation.run import study_ablation
    from greedynas.studies.contests import Options

    options = Options(
        preset=config,
        changes=_changes(settings, data),
        budget=_budget(flops, params, latency),
        seeds=tuple(range(first_seed, first_seed + seeds)),
        retrain_seeds=retrain_seeds,
        latency_table=latency_table,
        truth=truth,
        keep=keep,
        jobs=jobs,
    )
    result = study_ablation(out, quickly(options) if quick else options, shown_console(as_json))
    if as_json:
        print_json(result)


def _changes(settings: list[str] | None, data: str | None) -> dict[str, Any]:
    from greedynas.settings.loading import parse_assignments

    changes = parse_assignments(settings or [])
    return changes if data is None else {**changes, "data.source": data}


def _budget(flops: list[str] | None, params: list[str] | None, latency: list[str] | None) -> "Budget":
    from greedynas.spaces.budget import parse_limits

    budgets = parse_limits({"macs": (flops, None), "params": (params, None), "latency_ms": (latency, None)})
    if len(budgets) > 1:
        raise GreedyNASError("a study has one budget; give each limit once")
    return budgets[0]
