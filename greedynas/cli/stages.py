"""The verbs that work on a run directory: the whole job, and its stages one by one."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.options import (
    DataOption,
    DataRootOption,
    FlopsOption,
    JsonOption,
    LatencyOption,
    LatencyTableOption,
    ModelOption,
    NamedDataOption,
    OutOption,
    ParamsOption,
    PresetArgument,
    RunArgument,
    SeedOption,
    SetOption,
    app,
    print_json,
    say_next,
    shown_console,
)
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.terminal import say

HoursOption = Annotated[float | None, typer.Option("--hours", help="Fit the whole job into this time.")]


@app.command(epilog="Example: greedynas demo")
def demo(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")] = Path("greedynas-demo"),
) -> None:
    """The whole job on the embedded Fashion-MNIST sample, on a CPU, in a couple of minutes."""
    from greedynas.jobs.demo import run_demo

    run_demo(out, shown_console())


@app.command(epilog="Example: greedynas run auto --data photos/ --flops 5M --hours 2 --out runs/photos")
def run(
    preset: PresetArgument,
    data: DataOption = None,
    out: OutOption = None,
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    hours: HoursOption = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="A pretrained timm network to fine-tune beside the found one.")
    ] = None,
    baseline_weights: Annotated[
        Path | None, typer.Option("--baseline-weights", help="Its weights, if they are not in timm's cache.")
    ] = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """The whole job: train a supernet, search it, retrain what was found, export it and write the report."""
    from greedynas.jobs.job import Baseline, report_job, run_job
    from greedynas.jobs.resolving import settings_of
    from greedynas.settings.loading import parse_assignments
    from greedynas.spaces.budget import parse_limits

    if out is None:
        raise GreedyNASError("name the run directory with --out")
    if baseline_weights is not None and (baseline is None or not baseline_weights.is_file()):
        raise GreedyNASError("--baseline-weights takes a file, for the network that --baseline names")
    changes = parse_assignments(settings or [])
    changes |= {key: value for key, value in (("data.source", data), ("seed", seed)) if value is not None}
    console = shown_console(as_json)
    limits = {"macs": (flops, None), "params": (params, None), "latency_ms": (latency, None)}
    config, images = settings_of(preset, changes, out, console, parse_limits(limits), hours)
    beside = None if baseline is None else Baseline(baseline, str(baseline_weights or "cache"))
    result = run_job(config, out, limits, console, latency_table=latency_table, baseline=beside, data=images)
    if as_json:
        print_json(result)
    else:
        report_job(result, console)


@app.command(
    epilog="Example: greedynas train cifar10 --data photos/ --out runs/photos --set train.max_epochs=50 --seed 1"
)
def train(
    preset: PresetArgument,
    data: DataOption = None,
    out: OutOption = None,
    sampler: Annotated[str | None, typer.Option("--sampler", help="greedy, uniform or fair.")] = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Print the resolved settings and the cost, train nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a supernet: greedy (Algorithms 1 and 2), or one of the methods it is compared with."""
    from greedynas.jobs.resolving import settings_of
    from greedynas.settings.loading import parse_assignments

    changes = parse_assignments(settings or [])
    changes |= {
        key: value
        for key, value in (("data.source", data), ("train.sampler", sampler), ("seed", seed))
        if value is not None
    }
    console = shown_console(as_json)
    config, _ = settings_of(preset, changes, out, console)
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
    from greedynas.spaces.budget import told_count
    from greedynas.stages.train import report_training, train_stage

    result = train_stage(config, out, console)
    if as_json:
        print_json({"run": str(out), **result})
    else:
        report_training(result, console)
        middle = told_count(float(f"{sum(config.space.cost_tables['macs'].range) / 2:.2g}"))
        say_next(console, f"greedynas search {out} --flops {middle}")


@app.command(epilog="Example: greedynas search runs/photos --flops 330M --flops 280M --params 5M")
def search(
    run: Annotated[Path, typer.Argument(help="A run directory with a trained supernet.")],
    flops: FlopsOption = None,
    params: ParamsOption = None,
    latency: LatencyOption = None,
    latency_table: LatencyTableOption = None,
    min_flops: Annotated[str | None, typer.Option("--min-flops", help="At least so many multiply-adds.")] = None,
    min_params: Annotated[str | None, typer.Option("--min-params", help="At least so many parameters.")] = None,
    min_latency: Annotated[str | None, typer.Option("--min-latency", help="At least so long.")] = None,
    searcher: Annotated[str, typer.Option("--searcher", help="evolution (NSGA-II) or random.")] = "evolution",
    pool_init: Annotated[
        bool, typer.Option("--pool-init/--no-pool-init", help="Start from the candidate pool.")
    ] = True,
    front: Annotated[
        bool, typer.Option("--front", help="The best network at every cost, not only under the limit.")
    ] = False,
    objectives: Annotated[str, typer.Option("--objectives", help="Costs of the front: macs, or macs,params.")] = "macs",
    name: Annotated[
        str | None, typer.Option("--name", help="Of the search; made from the budget if not given.")
    ] = None,
    settings: SetOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of the search; the run's own if not given.")
    ] = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best path under a budget on a trained supernet (Algorithm 3), or by random search."""
    from greedynas.data.settings import Told
    from greedynas.stages.search import make_requests, search_stage
    from greedynas.stages.search_summary import report_searches

    limits = {"macs": (flops, min_flops), "params": (params, min_params), "latency_ms": (latency, min_latency)}
    chosen = tuple(objectives.split(",")) if front else ()
    requests = make_requests(run, limits, searcher, chosen, pool_init, name, settings or [], seed)
    console = shown_console(as_json)
    results = search_stage(run, requests, latency_table, console, named=Told(data, data_root))
    if as_json:
        print_json({"run": str(run), "searches": results})
    else:
        report_searches(results, run, front, console)
        say_next(console, f"greedynas retrain {run}")


@app.command(epilog="Example: greedynas retrain runs/photos --recipe sgd --set epochs=100 --top 3")
def retrain(
    run: RunArgument,
    recipe: Annotated[str | None, typer.Option("--recipe", help="sgd or rmsprop; the run's own if not given.")] = None,
    model: ModelOption = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help="Another network: a known one, op names, digits, timm:NAME, or random (one within the search's budget).",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the folder in DIR/models.")] = None,
    inherit: Annotated[bool, typer.Option("--inherit", help="Start from the supernet's weights.")] = False,
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="Learn from this network of the run too, such as a timm model.")
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option("--pretrained", help="Weights of a timm network: cache, or a file.")
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Train so many of the best found ones briefly, the best for long."),
    ] = None,
    latency_table: Annotated[
        Path | None,
        typer.Option("--latency-table", help="For --arch random: the search's table, if it is not DIR/latency.json."),
    ] = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the found network (or another one) from scratch, and test it."""
    from greedynas.data.settings import Told
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
        named=Told(data, data_root),
    )
    if as_json:
        print_json({"run": str(run), **result})
    else:
        report_retraining(result, console)
        say_next(console, f"greedynas export {run} --model {result['model']}")


@app.command(epilog="Example: greedynas export runs/photos --format onnx")
def export(
    run: RunArgument,
    model: ModelOption = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="onnx or safetensors; both if not given.")
    ] = None,
    data: NamedDataOption = None,
    data_root: DataRootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the trained network for other tools: ONNX in three precisions, safetensors with a card."""
    from greedynas.data.settings import Told
    from greedynas.runtime.parallel.ranks import on_first
    from greedynas.stages.export import export_stage, report_export

    console = shown_console(as_json)
    asked = {"model": model, "formats": formats or ("onnx", "safetensors"), "named": Told(data, data_root)}
    result = on_first(lambda: export_stage(run, console, **asked))  # type: ignore[arg-type]
    if as_json:
        print_json({"run": str(run), **result})
    else:
        report_export(result, run, console)
        say_next(console, f"greedynas report {run}")


@app.command(epilog="Example: greedynas report runs/photos")
def report(run: RunArgument, as_json: JsonOption = False) -> None:
    """Write DIR/report.html: one page, without the network, that shows what was found and why."""
    from greedynas.reporting.report import report_stage
    from greedynas.runtime.parallel.ranks import on_first

    console = shown_console(as_json)
    result = on_first(lambda: report_stage(run, console))
    if as_json:
        print_json(result)
    elif result["worth"] is not None:
        console.print(result["worth"], highlight=False, markup=False)
