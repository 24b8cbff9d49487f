"""`report.html`: one self-contained page about a run, from the files that its directory holds so far."""

from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from greedynas.reporting import story, tables, usage
from greedynas.reporting.architecture_chart import architecture_charts
from greedynas.reporting.charts import Chart, supernet_charts
from greedynas.reporting.facts import Facts, Model, read_facts
from greedynas.reporting.model_charts import model_charts
from greedynas.reporting.pages import render_page
from greedynas.reporting.search_charts import search_charts
from greedynas.reporting.worth import worth
from greedynas.rundir.schemas import Sample
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_atomically
from greedynas.runtime.text import size, table_of
from greedynas.spaces.drawing import STYLE, draw_path

MAX_SAMPLES = 24  # of the correct images, and of the mistakes


def report_stage(folder: Path, console: Console) -> dict[str, Any]:
    """Write the report of a run directory, print where it is, and return the summary that `--json` prints."""
    facts = read_facts(folder)
    charts = draw_charts(facts)
    file = _write(facts, charts)
    headline = story.headline(facts)
    text = " ".join([f"{headline.title}.", headline.lead, *story.caveats(facts)])
    console.print(text, highlight=False, markup=False)
    written = file.stat().st_size
    console.print(f"Report: {file} ({size(written)}, opens in any browser)", highlight=False, markup=False)
    if (command := story.next_command(facts)) is not None:
        console.print(f"Next: {command}", highlight=False, markup=False)
    return {
        "run": str(folder),
        "report": str(file),
        "bytes": written,
        "headline": headline.title,
        "worth": worth(facts),
        "caveats": story.caveats(facts),
        "charts": sorted(charts),
    }


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run directory."""
    facts = read_facts(folder)
    return _write(facts, draw_charts(facts))


def draw_charts(facts: Facts) -> dict[str, Chart]:
    """Return the charts by name, for all data that the run has."""
    training = supernet_charts(facts.training, facts.config.train) if facts.training is not None else {}
    learned = architecture_charts(facts.training, facts.space) if facts.training is not None else {}
    return {**model_charts(facts), **search_charts(facts), **training, **learned}


def render(facts: Facts, charts: dict[str, Chart]) -> str:
    """Return the page, from the template `page/report.html`."""
    return render_page(
        "report.html",
        charts,
        facts=facts,
        chosen=facts.chosen,
        test=facts.chosen.test if facts.chosen is not None else None,
        headline=story.headline(facts),
        choice=story.choice(facts),
        averaged=story.averaged_over_classes(facts),
        caveats=story.caveats(facts),
        tiles=story.tiles(facts),
        how_good=usage.how_good(facts),
        usages=usage.usages(facts),
        lead_verdict=story.lead_verdict(facts),
        verdicts=story.verdicts(facts),
        missing=story.missing(facts),
        latency_note=story.latency_note(facts),
        drawing=_drawing(facts.chosen),
        samples=_samples(facts.chosen),
        models=tables.model_table(facts),
        searches=tables.search_table(facts),
        front=tables.front_table(facts.search_of(facts.chosen) or next(iter(facts.searches), None), facts),
        costs=tables.cost_table(facts),
        top=tables.top_table(facts.chosen),
        export_remarks=tables.export_remarks(facts.chosen),
        exported=tables.export_table(facts.chosen),
        versions=table_of({name: value for name, value in facts.versions.items() if value is not None}),
    )


def _write(facts: Facts, charts: dict[str, Chart]) -> Path:
    file = facts.folder / "report.html"
    try:
        # The name of a folder may contain bytes that are not UTF-8.
        write_atomically(file, render(facts, charts).encode("utf-8", errors="replace"))
    except OSError as error:
        raise GreedyNASError(f"cannot write {file}: {error.strerror}") from None
    return file


def _drawing(model: Model | None) -> Markup | None:
    """Return the network as SVG without a style, because the page styles it by its theme."""
    if model is None or model.space is None or model.arch.path is None:
        return None
    svg = draw_path(model.arch.canonical_path or model.arch.path, model.space, title=model.name)
    return Markup(svg.replace(f"<style>{STYLE}</style>", ""))


def _samples(model: Model | None) -> dict[str, list[Sample]]:
    """Return sample test images, split into correct ones and mistakes."""
    samples = model.test.samples if model is not None and model.test is not None else ()
    right = [sample for sample in samples if sample.predicted == sample.label]
    wrong = [sample for sample in samples if sample.predicted != sample.label]
    return {"right": right[:MAX_SAMPLES], "wrong": wrong[:MAX_SAMPLES]}
