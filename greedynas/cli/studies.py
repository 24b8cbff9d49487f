"""`greedynas study`: the paper's questions as commands."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.options import (
    DataOption,
    DataRootOption,
    JsonOption,
    NamedDataOption,
    RunArgument,
    SetOption,
    app,
    print_json,
    shown_console,
)
from greedynas.runtime.terminal import say

study_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(study_app, name="study", help="The paper's studies, on your own data: is the ranking real?")

StudyOut = Annotated[Path, typer.Option("--out", help="The study's folder; the same command again goes on.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Parts at a time; one for each GPU or CPU core if not given.")
]


@study_app.callback(invoke_without_command=True)
def study_root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help(), lines=True)


@study_app.command(epilog="Example: greedynas study theory --m 10 --k 5 --q 0.6 --epsilon 0.5")
def theory(
    m: Annotated[int, typer.Option("--m", min=1, max=1000, help="Paths sampled for each filtering.")] = 10,
    k: Annotated[int, typer.Option("--k", help="Of them kept.")] = 5,
    q: Annotated[float, typer.Option("--q", help="Share of good paths in the space.")] = 0.6,
    epsilon: Annotated[float, typer.Option("--epsilon", help="Share of sampled paths that come from the pool.")] = 0.5,
    out: StudyOut = Path("study-theory"),
    as_json: JsonOption = False,
) -> None:
    """Theorem 1 and Figure 2: how likely are at least k good paths among m, with and without the pool?"""
    from greedynas.studies.theory.run import study_theory

    result = study_theory(out, shown_console(as_json), m, k, q, epsilon)
    if as_json:
        print_json(result)


@study_app.command(
    epilog="Example: greedynas study macro --data cifar10/ --truth nas-bench-macro_cifar10.json --seeds 5 --out study-macro"
)
def macro(
    data: DataOption = None,
    truth: Annotated[Path | None, typer.Option("--truth", help="NAS-Bench-Macro's JSON file.")] = None,
    out: StudyOut = Path("study-macro"),
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="uniform, fair or greedy; all if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="How many; one with --quick.")] = 5,
    first_seed: Annotated[int, typer.Option("--first-seed", min=0, help="The first of them.")] = 0,
    epochs: Annotated[
        float,
        typer.Option(
            "--epochs", min=0.01, help="Corrected cost of every method, in epochs of plain training; 6 with --quick."
        ),
    ] = 60.0,
    greedy_shares: Annotated[
        list[float] | None,
        typer.Option("--greedy-share", help="Greedy once more, with this share of the cost, such as 0.61."),
    ] = None,
    bn: Annotated[
        list[str] | None, typer.Option("--bn", help="Rank with this BatchNorm mode; several times: the first counts.")
    ] = None,
    moments: Annotated[int, typer.Option("--moments", min=1, max=1000, help="Rankings along each training.")] = 1,
    paths: Annotated[
        int | None, typer.Option("--paths", help="Random paths to rank; all 6,561 (3,969 networks) if not given.")
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", min=10, help="Validation images to rank on; all if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes on a CPU: few epochs and images, one seed.")] = False,
    untrained: Annotated[
        bool,
        typer.Option(
            "--untrained/--no-untrained",
            help="Rank untrained networks too (NWOT); a seed takes about six minutes of a CPU core.",
        ),
    ] = True,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the supernets.")] = True,
    settings: SetOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do supernets rank networks as training them would? All 3,969 of NAS-Bench-Macro (6,561 paths), by method and seed.

    --set key=value changes all methods, --set greedy.key=value one of them.
    """
    from greedynas.settings.loading import parse_assignments
    from greedynas.studies.macro.run import METHODS, MacroOptions, study_macro
    from greedynas.studies.macro.run import quick as quickly

    changes = parse_assignments(settings or [])
    options = MacroOptions(
        changes=changes if data is None else {**changes, "data.source": data},
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


@study_app.command(epilog="Example: greedynas study ranking greedynas-demo --train-uniform")
def ranking(
    run: RunArgument,
    uniform: Annotated[
        Path | None, typer.Option("--uniform", help="A run of the same space with a uniformly trained supernet.")
    ] = None,
    train_uniform: Annotated[
        bool, typer.Option("--train-uniform", help="Or train one here, at the corrected cost of the run.")
    ] = False,
    paths: Annotated[int, typer.Option("--paths", help="Random paths to rank.")] = 1000,
    images: Annotated[
        list[int] | None, typer.Option("--images", min=2, help="Filter images, several times; 10 and up if not given.")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, max=1000, help="Draws of filter images.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", help="The study's folder; DIR/studies/ranking if not given.")
    ] = None,
    jobs: JobsOption = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Table 3 and Figure 3: do few validation images rank paths as all of them do?"""
    from greedynas.data.settings import Told
    from greedynas.studies.ranking.run import RankingOptions, study_ranking

    options = RankingOptions(
        uniform=uniform,
        train_uniform=train_uniform,
        paths=paths,
        images=tuple(sorted(set(images or ()))),
        draws=draws,
        jobs=jobs,
        named=Told(data, data_root),
    )
    result = study_ranking(run, out or run / "studies" / "ranking", options, shown_console(as_json))
    if as_json:
        print_json(result)
