"""Repeat the studies of the paper: the verb `study`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from greedynas.cli.commands import add_family, make_app, option, switch, verb
from greedynas.cli.options import (
    DATA,
    OUTPUT,
    SETTINGS,
    DataOption,
    DataRootOption,
    JsonOption,
    LatencyOption,
    LatencyTableOption,
    NamedDataOption,
    OneFlopsOption,
    ParamsOption,
    RunArgument,
    SetOption,
    print_json,
    shown_console,
)

if TYPE_CHECKING:
    from greedynas.spaces.budget import Budget

COMPARISON = "Comparison"
RANKING = "Ranking"

app = make_app()
study_app = add_family(
    app,
    "study",
    "greedynas study macro --quick --data cifar10/ --truth macro.json",
    "greedynas study methods runs/photos --flops 30M --seeds 3",
    help="Repeat the studies of the paper on your own data.",
    panel="Research",
)

StudyOut = Annotated[
    Path, option("--out", "DIR", "Write to this folder. Run the same command again to resume.", OUTPUT)
]
KeepOption = Annotated[bool, switch("--keep/--no-keep", "Keep the trained supernets and networks.", OUTPUT)]
JobsOption = Annotated[
    int | None,
    option("--jobs", "N", "Parts to run at the same time. By default, one per GPU or CPU core.", SETTINGS, min=1),
]
FirstSeedOption = Annotated[int, option("--first-seed", "N", "First seed; the others follow it.", SETTINGS, min=0)]

# Options of methods and ablation
ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A preset (fashion, cifar10, imagenet, imagenet-se), a YAML file, or a run directory."
    ),
]
SeedsOption = Annotated[
    int, option("--seeds", "N", "Number of seeds, each with supernets of its own.", SETTINGS, min=1, max=1000)
]
RetrainSeedsOption = Annotated[
    int, option("--retrain-seeds", "N", "Number of trainings of each found network.", SETTINGS, min=1, max=1000)
]
TruthOption = Annotated[
    Path | None,
    option("--truth", "FILE", "Look up accuracies in NAS-Bench-Macro's JSON file instead of retraining.", DATA),
]
QuickOption = Annotated[
    bool, switch("--quick", "Try the study in minutes on a CPU, with small sizes and two seeds.", SETTINGS)
]


@verb(study_app, "greedynas study theory --m 10 --k 5 --q 0.6 --epsilon 0.5")
def theory(
    m: Annotated[int, option("--m", "N", "Number of paths that are sampled.", SETTINGS, min=1, max=1000)] = 10,
    k: Annotated[int, option("--k", "N", "Number of sampled paths that are kept.", SETTINGS)] = 5,
    q: Annotated[float, option("--q", "SHARE", "Share of good paths in the space.", SETTINGS)] = 0.6,
    epsilon: Annotated[
        float, option("--epsilon", "SHARE", "Share of paths that are sampled from the candidate pool.", SETTINGS)
    ] = 0.5,
    out: StudyOut = Path("study-theory"),
    as_json: JsonOption = False,
) -> None:
    """Compute how likely it is that enough paths are good (Theorem 1).

    The probability that at least k of m sampled paths are good is computed with and without the candidate pool, as in
    Figure 2.
    """
    from greedynas.studies.theory.run import study_theory

    result = study_theory(out, shown_console(as_json), m, k, q, epsilon)
    if as_json:
        print_json(result)


@verb(
    study_app,
    "greedynas study macro --data cifar10/ --truth macro.json --seeds 5",
    "greedynas study macro --data cifar10/ --truth macro.json --quick",
)
def macro(
    data: DataOption = None,
    truth: Annotated[Path | None, option("--truth", "FILE", "NAS-Bench-Macro's JSON file.", DATA)] = None,
    out: StudyOut = Path("study-macro"),
    keep: KeepOption = True,
    methods: Annotated[
        list[str] | None,
        option("--method", "NAME", "Method to compare: uniform, fair or greedy. By default, all of them.", COMPARISON),
    ] = None,
    epochs: Annotated[
        float,
        option(
            "--epochs",
            "N",
            "Corrected cost of every method, in epochs of plain training; 6 with --quick.",
            COMPARISON,
            min=0.01,
        ),
    ] = 60.0,
    greedy_shares: Annotated[
        list[float] | None,
        option("--greedy-share", "SHARE", "Train greedy again at this share of the cost, such as 0.61.", COMPARISON),
    ] = None,
    untrained: Annotated[
        bool,
        switch(
            "--untrained/--no-untrained",
            "Rank untrained networks (NWOT) as well, which takes a CPU core about six minutes per seed.",
            COMPARISON,
        ),
    ] = True,
    paths: Annotated[
        int | None,
        option("--paths", "N", "Rank this many random paths. By default, all 6,561 (3,969 networks).", RANKING),
    ] = None,
    images: Annotated[
        int | None,
        option("--images", "N", "Rank on this many validation images. By default, on all.", RANKING, min=10),
    ] = None,
    bn: Annotated[
        list[str] | None,
        option(
            "--bn",
            "MODE",
            "BatchNorm statistics: batch, recalibrate or running. If repeated, the first one counts.",
            RANKING,
        ),
    ] = None,
    moments: Annotated[
        int, option("--moments", "N", "Rank this many times during each training.", RANKING, min=1, max=1000)
    ] = 1,
    seeds: Annotated[int, option("--seeds", "N", "Number of seeds; one with --quick.", SETTINGS, min=1, max=1000)] = 5,
    first_seed: FirstSeedOption = 0,
    quick: Annotated[
        bool, switch("--quick", "Try the study in minutes on a CPU, with few epochs and images.", SETTINGS)
    ] = False,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how well supernets rank the networks of NAS-Bench-Macro.

    The rankings are compared with the accuracies of all 3,969 networks (6,561 paths) after training from scratch. An accuracy is the
    highest on the test set in 50 epochs.

    Use --set KEY=VALUE to change a setting of all methods, and --set greedy.KEY=VALUE to change it for one of them.
    """
    from greedynas.studies.macro.run import METHODS, MacroOptions, study_macro
    from greedynas.studies.macro.run import quick as quickly

    options = MacroOptions(
        changes=_changes(settings, data),
        methods=tuple(dict.fromkeys(methods or METHODS)),
        seeds=tuple(range(first_seed, first_seed + seeds)),
        epochs=epochs,
        greedy_shares=tuple(dict.fromkeys(greedy_shares or ())),
        bn=tuple(dict.fromkeys(bn or ())),
        moments=moments,
        paths=paths,
        images=images,
        untrained=untrained,
        keep=keep,
        jobs=jobs,
        truth=truth,
    )
    result = study_macro(out, quickly(options) if quick else options, shown_console(as_json))
    if as_json:
        print_json(result)


@verb(study_app, "greedynas study ranking greedynas-demo --train-uniform")
def ranking(
    run: RunArgument,
    uniform: Annotated[
        Path | None,
        option("--uniform", "DIR", "Run of the same space with a uniformly trained supernet.", COMPARISON),
    ] = None,
    train_uniform: Annotated[
        bool, switch("--train-uniform", "Train such a supernet here, at the corrected cost of the run.", COMPARISON)
    ] = False,
    paths: Annotated[int, option("--paths", "N", "Number of random paths to rank.", RANKING)] = 1000,
    images: Annotated[
        list[int] | None,
        option("--images", "N", "Number of filter images. Can be repeated; by default, 10 and more.", RANKING, min=2),
    ] = None,
    draws: Annotated[
        int, option("--draws", "N", "Number of random draws of filter images.", RANKING, min=1, max=1000)
    ] = 3,
    out: Annotated[
        Path | None, option("--out", "DIR", "Write to this folder. By default, DIR/studies/ranking.", OUTPUT)
    ] = None,
    jobs: JobsOption = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how well few validation images rank paths (Table 3).

    Paths are ranked by their loss on few validation images and by their accuracy on all of them, as in Table 3 and
    Figure 4.
    """
    from greedynas.data.settings import DataOptions
    from greedynas.studies.ranking.run import RankingOptions, study_ranking

    options = RankingOptions(
        uniform=uniform,
        train_uniform=train_uniform,
        paths=paths,
        images=tuple(sorted(set(images or ()))),
        draws=draws,
        jobs=jobs,
        named=DataOptions(data, data_root),
    )
    result = study_ranking(run, out or run / "studies" / "ranking", options, shown_console(as_json))
    if as_json:
        print_json(result)


def split_names(chosen: list[str] | None) -> list[str]:
    """Return names that are given one by one, or several at a time with commas."""
    return [name.strip() for names in chosen or [] for name in names.split(",")]


@verb(
    study_app,
    "greedynas study methods fashion --flops 800K --seeds 5",
    "greedynas study methods fashion --methods greedy,darts,fbnet",
)
def methods(
    config: ConfigArgument,
    data: DataOption = None,
    truth: TruthOption = None,
    out: StudyOut = Path("study-methods"),
    keep: KeepOption = True,
    flops: OneFlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    chosen: Annotated[
        list[str] | None,
        option(
            "--method",
            "NAME",
            "Methods to compare, separated by commas or repeated: random, uniform, uniform-E, fair, fair-E, greedy, darts, "
            "fbnet, proxyless, proxyless-reinforce, mdenas, single-path. By default, the first four and greedy.",
            COMPARISON,
            "--methods",
        ),
    ] = None,
    searchers: Annotated[
        list[str] | None,
        option("--searcher", "NAME", "Search method to compare: random or evolution. By default, both.", COMPARISON),
    ] = None,
    epochs: Annotated[
        float | None,
        option("--epochs", "N", "Corrected cost of uniform and fair, in epochs of plain training.", COMPARISON),
    ] = None,
    systematic: Annotated[
        int,
        option(
            "--systematic",
            "N",
            "Retrain this many paths, at least 30, at equal steps of each search's ranking.",
            COMPARISON,
            min=0,
        ),
    ] = 0,
    seeds: SeedsOption = 3,
    first_seed: FirstSeedOption = 0,
    retrain_seeds: RetrainSeedsOption = 1,
    quick: QuickOption = False,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what different methods find (Table 1).

    Costs are compared as well, and the memory and the time of updates, as in Tables 1, 2 and 6.
    A method that learns probabilities of ops trains for at most greedy's cost, and its network is derived within the limits.

    Use --set KEY=VALUE to change a setting of all methods, and --set uniform.KEY=VALUE to change it for one of them.
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
        methods=tuple(dict.fromkeys(split_names(chosen) or METHODS)),
        searchers=tuple(dict.fromkeys(searchers or SEARCHERS)),
        epochs=epochs,
        systematic=systematic,
    )
    result = study_methods(out, quickly(options) if quick else options, shown_console(as_json))
    if as_json:
        print_json(result)


@verb(study_app, "greedynas study ablation fashion --flops 800K --seeds 5")
def ablation(
    config: ConfigArgument,
    data: DataOption = None,
    truth: TruthOption = None,
    out: StudyOut = Path("study-ablation"),
    keep: KeepOption = True,
    flops: OneFlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    seeds: SeedsOption = 3,
    first_seed: FirstSeedOption = 0,
    retrain_seeds: RetrainSeedsOption = 1,
    quick: QuickOption = False,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare filtering and the uses of the pool, on and off (Table 4).

    Net1 to Net6 of the paper are trained, searched and retrained.
    """
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


@verb(
    study_app,
    "greedynas study searchers synthetic --seeds 100",
    "greedynas study searchers macro --limit none --limit macs=60M",
    "greedynas study searchers study-macro/ trained.csv",
)
def searchers(
    tables: Annotated[
        list[str],
        typer.Argument(
            metavar="TABLE",
            help="Tables: macro (NAS-Bench-Macro), synthetic (7^21 paths), a CSV file (decisions, accuracy, costs), "
            "or supernets recorded by study macro (its folder, or a .npz file).",
        ),
    ],
    truth: Annotated[Path | None, option("--truth", "FILE", "NAS-Bench-Macro's JSON file.", DATA)] = None,
    out: StudyOut = Path("study-searchers"),
    chosen: Annotated[
        list[str] | None,
        option(
            "--searcher",
            "NAME",
            "Searcher; the first one is compared with the others. By default model, evolution, aging, local, random.",
            COMPARISON,
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        option(
            "--limit",
            "COST=N",
            "Upper limit such as macs=60M, or none. Can be repeated; each is searched by itself.",
            COMPARISON,
        ),
    ] = None,
    evaluations: Annotated[
        int, option("--evaluations", "N", "Evaluations of each search.", SETTINGS, min=2, max=100_000)
    ] = 1000,
    population: Annotated[
        int, option("--population", "N", "Paths of a generation.", SETTINGS, min=2, max=100_000)
    ] = 50,
    seeds: Annotated[int, option("--seeds", "N", "Number of seeds.", SETTINGS, min=1, max=100_000)] = 100,
    first_seed: FirstSeedOption = 0,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare searchers on tables of known accuracies.

    The regret, the distance to the best path within the limits, is measured after each evaluation. No GPU is needed.
    """
    from greedynas.studies.searchers.run import NAMES, SearchersOptions, parse_limits, study_searchers

    options = SearchersOptions(
        tables=tuple(dict.fromkeys(tables)),
        searchers=tuple(dict.fromkeys(chosen or NAMES)),
        limits=parse_limits(limit),
        evaluations=evaluations,
        population=population,
        seeds=tuple(range(first_seed, first_seed + seeds)),
        truth=truth,
        jobs=jobs,
    )
    result = study_searchers(out, options, shown_console(as_json))
    if as_json:
        print_json(result)


def _changes(settings: list[str] | None, data: str | None) -> dict[str, Any]:
    """Return the settings that the command line changes."""
    from greedynas.settings.loading import parse_assignments

    changes = parse_assignments(settings or [])
    return changes if data is None else {**changes, "data.source": data}


def _budget(flops: list[str] | None, params: list[str] | None, latency: list[str] | None) -> "Budget":
    """Return the one budget of a study."""
    from greedynas.spaces.budget import one_budget

    return one_budget({"macs": (flops, None), "params": (params, None), "latency_ms": (latency, None)}, "a study")
