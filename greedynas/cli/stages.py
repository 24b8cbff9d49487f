"""Run the job stage by stage: the verbs `train`, `search`, `retrain`, `export` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.commands import make_app, option, switch, verb
from greedynas.cli.options import (
    BUDGET,
    NETWORK,
    OUTPUT,
    SETTINGS,
    CallbackOption,
    DataOption,
    DataRootOption,
    FlashOption,
    FlopsOption,
    JsonOption,
    LatencyOption,
    LatencyTableOption,
    ModelOption,
    NamedDataOption,
    OneFlopsOption,
    OutOption,
    ParamsOption,
    PresetArgument,
    RamOption,
    RunArgument,
    SeedOption,
    SetOption,
    TrackOption,
    print_json,
    say_next,
    shown_console,
    split_names,
    tracked,
)
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import say

PANEL = "Stages"
SEARCH = "Search"
TRAINING = "Training"

app = make_app()


@verb(
    app,
    "greedynas train cifar10 --data photos/ --out runs/photos --seed 1",
    "greedynas train cifar10 --data photos/ --flops 60M --out runs/60M",
    "greedynas train imagenet --plan",
    panel=PANEL,
    long=True,
)
def train(
    preset: PresetArgument,
    data: DataOption = None,
    out: OutOption = None,
    sampler: Annotated[
        str | None,
        option(
            "--sampler",
            "NAME",
            "Sampler: greedy (Algorithms 1 and 2), uniform, fair; a method that learns probabilities of ops: darts, fbnet, "
            "proxyless, proxyless-reinforce, mdenas, single-path; or one of a plugin.",
            SETTINGS,
        ),
    ] = None,
    flops: OneFlopsOption = None,
    params: ParamsOption = None,
    settings: SetOption = None,
    callbacks: CallbackOption = None,
    track: TrackOption = None,
    seed: SeedOption = None,
    only_plan: Annotated[
        bool, switch("--plan", "Print all settings and the expected cost, and train nothing.", OUTPUT)
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a supernet on your images.

    With --flops or --params, only paths within these limits are explored and enter the candidate pool, for searches
    under the same limits.
    """
    from greedynas.jobs.resolving import settings_of
    from greedynas.settings.loading import parse_assignments
    from greedynas.spaces.budget import one_budget

    changes = parse_assignments(settings or [])
    budget = one_budget({"macs": (flops, None), "params": (params, None)}, "a training")
    if budget.limits():
        changes["train.limits"] = budget.model_dump(exclude_none=True)
    changes |= {
        key: value
        for key, value in (
            ("data.source", data),
            ("train.sampler", sampler),
            ("callbacks", tracked(callbacks, track)),
            ("seed", seed),
        )
        if value is not None
    }
    console = shown_console(as_json)
    config, _ = settings_of(preset, changes, out, console, [budget])
    if only_plan:
        from greedynas.stages.train import plan, plan_table

        if as_json:
            print_json({"config": config.model_dump(mode="json"), "plan": plan(config)})
        else:
            import yaml

            table = plan_table(config)
            text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
            say(text, lines=True)
            console.print(table)
        return
    if out is None:
        raise GreedyNASError("name the run directory with --out")
    from greedynas.spaces.budget import short_count
    from greedynas.stages.train import report_training, train_stage

    result = train_stage(config, out, console)
    if as_json:
        print_json({"run": str(out), **result})
    else:
        report_training(result, console)
        middle = float(f"{sum(config.space.cost_tables['macs'].range) / 2:.2g}")
        limit = None if config.train.limits is None else config.train.limits.max_macs
        say_next(console, f"greedynas search {out} --flops {short_count(limit or middle)}")


@verb(
    app,
    "greedynas search runs/photos --flops 330M --flops 280M --params 5M",
    "greedynas search runs/photos --front --objectives macs,params",
    panel=PANEL,
    long=True,
)
def search(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory with a trained supernet.")],
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    ram: RamOption = None,
    flash: FlashOption = None,
    min_flops: Annotated[str | None, option("--min-flops", "N", "Lower limit on multiply-adds.", BUDGET)] = None,
    min_params: Annotated[str | None, option("--min-params", "N", "Lower limit on parameters.", BUDGET)] = None,
    min_latency: Annotated[str | None, option("--min-latency", "TIME", "Lower limit on latency.", BUDGET)] = None,
    searcher: Annotated[
        str | None,
        option(
            "--searcher",
            "NAME",
            "Search method: evolution (NSGA-II, Algorithm 3), model, aging, local, reinforce, random, or derivation (the "
            "most probable path of a method). By default, that of the run.",
            SEARCH,
        ),
    ] = None,
    pool_init: Annotated[bool, switch("--pool-init/--no-pool-init", "Start from the candidate pool.", SEARCH)] = True,
    front: Annotated[
        bool, switch("--front", "Find the best network at every cost, not only within the limits.", SEARCH)
    ] = False,
    objectives: Annotated[
        str,
        option("--objectives", "COSTS", "Costs that --front trades for accuracy, such as macs or macs,params.", SEARCH),
    ] = "macs",
    name: Annotated[
        str | None, option("--name", "NAME", "Name of the search. By default, it is made from the budget.", OUTPUT)
    ] = None,
    now: Annotated[
        bool,
        switch("--now", "Search the newest checkpoint of a supernet whose training is not finished.", SEARCH),
    ] = False,
    settings: SetOption = None,
    seed: Annotated[
        int | None, option("--seed", "N", "Seed of the search. By default, it is the seed of the run.", SETTINGS, min=0)
    ] = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search a trained supernet for the best network within a budget."""
    from greedynas.data.settings import DataOptions
    from greedynas.stages.search import make_requests, search_stage
    from greedynas.stages.search_summary import report_searches

    limits = {"macs": (flops, min_flops), "params": (params, min_params), "latency_ms": (latency, min_latency)}
    limits |= {"ram": (ram, None), "flash": (flash, None)}
    chosen = tuple(objectives.split(",")) if front else ()
    requests = make_requests(run, limits, searcher, chosen, pool_init, name, settings or [], seed, now=now)
    console = shown_console(as_json)
    results = search_stage(run, requests, latency_table, console, named=DataOptions(data, data_root), now=now)
    if as_json:
        print_json({"run": str(run), "searches": results})
    else:
        report_searches(results, run, front, console)
        say_next(console, f"greedynas retrain {run}")


@verb(
    app,
    "greedynas retrain runs/photos --recipe sgd --set epochs=100 --top 3",
    "greedynas retrain runs/photos --arch timm:mobilenetv2_100",
    panel=PANEL,
    long=True,
)
def retrain(
    run: RunArgument,
    model: ModelOption = None,
    arch: Annotated[
        str | None,
        option(
            "--arch",
            "NETWORK",
            "Train another network: a known one, op names, digits, timm:NAME, or random for one within the budget.",
            NETWORK,
        ),
    ] = None,
    name: Annotated[str | None, option("--name", "NAME", "Name of the folder in DIR/models.", NETWORK)] = None,
    latency_table: Annotated[
        Path | None,
        option(
            "--latency-table",
            "FILE",
            "Latency table of the search for --arch random, if it is not DIR/latency.json.",
            NETWORK,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        option(
            "--recipe",
            "NAME",
            "Training recipe: sgd, rmsprop or finetune. By default, the one in the settings of the run.",
            TRAINING,
        ),
    ] = None,
    inherit: Annotated[bool, switch("--inherit", "Start from the weights of the supernet.", TRAINING)] = False,
    pretrained: Annotated[
        str | None,
        option(
            "--pretrained",
            "WEIGHTS",
            "Pretrained weights of a timm model: package (an installed one), cache (timm's), auto (either), or a file.",
            TRAINING,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        option("--teacher", "NAME", "Distill from this trained network of the run, such as a timm model.", TRAINING),
    ] = None,
    top: Annotated[
        int | None,
        option(
            "--top",
            "N",
            "Train the N best networks of the search briefly, then the best of them in full.",
            TRAINING,
            min=1,
        ),
    ] = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the found network, or another one, and test it."""
    from greedynas.data.settings import DataOptions
    from greedynas.settings.loading import changed_section, parse_assignments
    from greedynas.stages.retrain import report_retraining, retrain_stage
    from greedynas.stages.run import read_run_config

    changes = parse_assignments(settings or [])
    asked = {"recipe": recipe, "inherit": inherit or None, "teacher": teacher, "top": top}
    changes |= {f"retrain.{key}": value for key, value in asked.items() if value is not None}
    chosen = changed_section(read_run_config(run), "retrain", changes)
    console = shown_console(as_json)
    result = retrain_stage(
        run,
        console,
        settings=chosen,
        model=model,
        arch=arch,
        name=name,
        pretrained=pretrained,
        seed=seed,
        latency_table=latency_table,
        named=DataOptions(data, data_root),
    )
    if as_json:
        print_json({"run": str(run), **result})
    else:
        report_retraining(result, console)
        say_next(console, f"greedynas export {run} --model {result['model']}")


@verb(
    app,
    "greedynas export runs/photos --format onnx",
    "greedynas export runs/photos --format openvino --precision int8",
    panel=PANEL,
    long=True,
)
def export(
    run: RunArgument,
    model: ModelOption = None,
    formats: Annotated[
        list[str] | None,
        option(
            "--format",
            "NAMES",
            "File formats: onnx, safetensors, pt2, openvino, executorch, litert, ncnn, coreml, web. By default, onnx and "
            "safetensors.",
            OUTPUT,
        ),
    ] = None,
    precisions: Annotated[
        list[str] | None,
        option("--precision", "NAMES", "Precisions: fp32, fp16, int8. By default, all that a format has.", OUTPUT),
    ] = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export the trained network to ONNX and other formats.

    Each file is compared with PyTorch in its own runtime, and its accuracy and latency are measured. Most formats need
    an extra, such as greedynas[openvino]. The reference precision of a format, fp32, is always written.
    """
    from greedynas.data.settings import DataOptions
    from greedynas.runtime.parallel.ranks import on_first
    from greedynas.stages.export import DEFAULT_FORMATS, export_stage
    from greedynas.stages.export_report import report_export

    console = shown_console(as_json)
    asked = {"formats": split_names(formats) or DEFAULT_FORMATS, "precisions": split_names(precisions)}
    options = {"model": model, "named": DataOptions(data, data_root), **asked}
    result = on_first(lambda: export_stage(run, console, **options))  # type: ignore[arg-type]
    if as_json:
        print_json({"run": str(run), **result})
    else:
        report_export(result, run, console)
        say_next(console, f"greedynas report {run}")


@verb(app, "greedynas report runs/photos", panel=PANEL, long=True)
def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Write a self-contained HTML report of what was found and why.

    The report is DIR/report.html and opens without a network connection.
    """
    from greedynas.reporting import check_packages

    check_packages()
    from greedynas.reporting.report import report_stage
    from greedynas.runtime.parallel.ranks import on_first

    console = shown_console(as_json)
    result = on_first(lambda: report_stage(run, console))
    if as_json:
        print_json(result)
    elif result["worth"] is not None:
        console.print(result["worth"], highlight=False, markup=False)
