"""The tables of the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from greedynas.greedy.ratio import plausible
from greedynas.greedy.schedule import PAPER_RATIO
from greedynas.reporting.cells import Table, make_table
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.model_charts import standard_error
from greedynas.reporting.search_charts import initialisation
from greedynas.reporting.story import caveats
from greedynas.reporting.worth import CHANCE
from greedynas.rundir.schemas import Exported, Search, Tested
from greedynas.runtime.text import count, duration, epochs, milliseconds, percent, size
from greedynas.spaces.budget import limits
from greedynas.spaces.paths import pretty
from greedynas.spaces.zoo import known_networks

MAX_ROWS = 60
SLOWER = 1.05  # times the latency of fp32; smaller differences between two measurements mean nothing


def origin_of(model: Model, facts: Facts) -> str:
    """Return the origin of a network in a few words."""
    if model.arch.timm is not None:
        return "timm model, pretrained elsewhere" if model.arch.pretrained else "timm model"
    if model.arch.within is not None:
        return f"drawn at random within the budget of {model.arch.within}"
    search = facts.search_of(model)
    if search is not None:
        return f"found: {initialisation(search)}"
    return "known network" if model.name in known_networks() else "given path"


def ordered(facts: Facts) -> list[Model]:
    """Return the networks by test accuracy, the chosen one first and those without an accuracy last."""
    rest = [model for model in facts.models if model is not facts.chosen]
    rest.sort(key=lambda model: -model.test.top1 if model.test is not None and not model.test.withheld else 1.0)
    return [*([facts.chosen] if facts.chosen is not None else []), *rest][:MAX_ROWS]


def model_table(facts: Facts) -> Table | None:
    """Return the table of all networks of the run."""
    models = ordered(facts)
    if not models:
        return None
    arches, tests = [model.arch for model in models], [model.test for model in models]
    columns = {
        "network": [model.name for model in models],
        "top-1 on test": [_top1_with_range(test) if test else "" for test in tests],
        "multiply-adds": [count(arch.macs) if arch.macs is not None else "" for arch in arches],
        "parameters": [count(arch.params) if arch.params is not None else "" for arch in arches],
        "predicted latency": [milliseconds(a.latency_ms) if a.latency_ms is not None else "" for a in arches],
        "top-5": [shown_accuracy(t, t.top5) if t and t.top5 is not None else "" for t in tests],
        "macro average": [shown_accuracy(t, t.macro) if t else "" for t in tests],
        "on the supernet": [percent(a.supernet_accuracy) if a.supernet_accuracy is not None else "" for a in arches],
        "what": [origin_of(model, facts) for model in models],
        "recipe": [_recipe(model) for model in models],
    }
    marked = 0 if facts.chosen is not None and len(models) > 1 else None
    return make_table(columns, {"what", "recipe"}, marked=marked, note=" ".join(caveats(facts)))


def shown_accuracy(test: Tested, value: float) -> str:
    """Return an accuracy on the test set as text, or `withheld` if too many test images are copies."""
    return "withheld" if test.withheld else percent(value)


def _top1_with_range(test: Tested) -> str:
    if test.withheld:
        return "withheld"
    return f"{percent(test.top1)} ± {100 * CHANCE * standard_error(test):.1f}"


def _recipe(model: Model) -> str:
    arch = model.arch
    if model.test is None:
        return ""
    long = epochs(arch.epochs) if arch.epochs is not None else ""
    extras = ["from the supernet's weights"] if arch.inherit else []
    extras += [f"taught by {arch.teacher}"] if arch.teacher else []
    return ", ".join(part for part in (arch.recipe or "", long, *extras) if part)


def search_table(facts: Facts) -> Table | None:
    searches = facts.searches[:MAX_ROWS]
    if not searches:
        return None
    best = [max((entry.accuracy for entry in search.found), default=None) for search in searches]
    columns = {
        "search": [search.name for search in searches],
        "best on the supernet": [percent(value) if value is not None else "" for value in best],
        "paths evaluated": [f"{len(search.found):,}" for search in searches],
        "distinct networks": [f"{facts.networks[search.name]:,}" for search in searches],
        "rejected": [f"{search.rejected:,}" for search in searches],
        "time": [duration(search.seconds) if search.seconds is not None else "" for search in searches],
        "limit": [limits(search.budget) or "none" for search in searches],
        "how": [_how(search) for search in searches],
    }
    note = "Rejected: offspring that violated a limit and were not evaluated."
    return make_table(columns, {"how", "limit"}, note=note)


def _how(search: Search) -> str:
    if search.searcher == "derivation":
        return "most probable path"
    if search.searcher != "evolution":
        return f"{search.searcher} search"
    start = f"{search.from_pool} of its first paths from the pool" if search.pool_init else "random first paths"
    return f"evolution, {start}"


def front_table(search: Search | None, facts: Facts) -> Table | None:
    """Return the Pareto front as a table, best network first."""
    if search is None or not search.front:
        return None
    front = sorted(search.front, key=lambda entry: -entry.worth)[:MAX_ROWS]
    latencies = [milliseconds(e.latency_ms) if e.latency_ms is not None else "" for e in front]
    columns = {
        "score": [percent(entry.score) if entry.score is not None else "" for entry in front],
        "on the supernet": [percent(entry.accuracy) for entry in front],
        "multiply-adds": [count(entry.macs) for entry in front],
        "parameters": [count(entry.params) for entry in front],
        "predicted latency": latencies,
        "network": [pretty(entry.path, facts.space) for entry in front],
    }
    return make_table(columns, {"network"})


def top_table(model: Model | None) -> Table | None:
    """Return the table of the short trainings that the chosen network was selected by."""
    if model is None or not model.top:
        return None
    top = model.top[:MAX_ROWS]
    columns = {
        "network": [" ".join(arch.ops) for arch in top],
        "on validation images": [percent(arch.val_top1) for arch in top],
        "average over classes": [percent(arch.val_macro) if arch.val_macro is not None else "" for arch in top],
        "on the supernet": [percent(a.supernet_accuracy) if a.supernet_accuracy is not None else "" for a in top],
        "multiply-adds": [count(arch.macs) if arch.macs is not None else "" for arch in top],
        "parameters": [count(arch.params) if arch.params is not None else "" for arch in top],
    }
    taken = next((i for i, arch in enumerate(top) if arch.path == model.arch.path), None)
    note = f"Each was trained for {epochs(top[0].epochs or 0)} on the training images alone. Marked: the selected one."
    return make_table(columns, marked=taken, note=note)


@dataclass(frozen=True)
class CostTable:
    """The paper's Table 1 for this run: rows of [method, top-1, multiply-adds, latency, parameters] and the costs."""

    rows: list[list[str]]
    note: str


def cost_table(facts: Facts) -> CostTable | None:
    """Return the cost of supernet training in images, which networks from the supernet share and rivals do not have."""
    if facts.training is None or not facts.training.epochs:
        return None
    last = facts.training.epochs[-1]
    costs = [
        f"{count(last.optimization_images / max(last.epoch, 1))} × {last.epoch}",
        f"{count(last.evaluation_images / max(last.epoch, 1))} × {last.epoch}" if last.evaluation_images else "–",
        count(last.corrected_images),
    ]
    found = [model for model in ordered(facts) if model.arch.supernet_accuracy is not None]
    rivals = [model for model in ordered(facts) if model not in found and model.test is not None]
    rows = [[model.name, *_performance(model), *costs] for model in found]
    rows += [[model.name, *_performance(model), "–", "–", "–"] for model in rivals]
    rows = rows or [[f"supernet ({facts.config.train.sampler})", "–", "–", "–", "–", *costs]]
    note = (
        f"Images, per epoch × epochs; the number of evaluations is a mean, as the warm-up has none. In total "
        f"{last.optimization_images:,} optimization and {last.evaluation_images:,} evaluation images. Corrected = "
        f"optimization + evaluation / {PAPER_RATIO}, the paper's ratio of a training step to a forward pass; "
    )
    if last.corrected_images_measured is not None and plausible(last.measured_ratio):
        note += f"with the ratio measured on this machine, {last.measured_ratio:.1f}, it is {count(last.corrected_images_measured)}."
    else:
        note += "the ratio on this machine could not be measured."
    note = " ".join([note, *caveats(facts)])
    return CostTable(rows, note)


def _performance(model: Model) -> list[str]:
    arch = model.arch
    return [
        shown_accuracy(model.test, model.test.top1) if model.test is not None else "–",
        count(arch.macs) if arch.macs is not None else "–",
        milliseconds(arch.latency_ms) if arch.latency_ms is not None else "–",
        count(arch.params) if arch.params is not None else "–",
    ]


def export_table(model: Model | None) -> Table | None:
    """Return the table of size, accuracy and latency of the exported files."""
    if model is None or model.export is None or not model.export.files:
        return None
    files: Sequence = model.export.files
    agreement = [
        f"{f.agrees.max_difference:.0e} on {f.agrees.images} images" if f.agrees is not None else "" for f in files
    ]
    columns = {
        "file": [f.file for f in files],
        "precision": [f.precision for f in files],
        "size": [size(f.bytes) for f in files],
        "top-1 on test": [_exported_top1(model.export, f.top1) for f in files],
        "latency": [milliseconds(f.latency_ms) if f.latency_ms is not None else "" for f in files],
        "largest difference from PyTorch": agreement,
    }
    threads = f"{model.export.threads} thread{'s' if model.export.threads != 1 else ''}"
    notes = [
        f"Latency of one image on {model.export.machine}, {threads}; accuracy on {model.export.images:,} test images."
    ]
    notes += [f"{left.file} could not be made: {left.why}." for left in model.export.skipped]
    notes += [f"{one[:1].upper()}{one[1:]}." for one in model.export.caveats]
    return make_table(columns, {"precision"}, note=" ".join(notes))


def export_remarks(model: Model | None) -> list[str]:
    """Return a remark for each file of a lower precision that is slower, larger or less accurate than fp32."""
    files = model.export.files if model is not None and model.export is not None else ()
    whole = {file.format: file for file in files if file.precision == "fp32"}
    remarks = []
    for file in files:
        base = whole.get(file.format)
        if base is None or file is base:
            continue
        worse = []
        if file.latency_ms is not None and base.latency_ms is not None and file.latency_ms > SLOWER * base.latency_ms:
            worse.append(f"slower ({milliseconds(file.latency_ms)} against {milliseconds(base.latency_ms)})")
        if file.bytes > base.bytes:
            worse.append(f"larger ({size(file.bytes)} against {size(base.bytes)})")
        if not worse:
            continue
        reason = (
            ", as often with small networks or a processor without instructions for it" if "slower" in worse[0] else ""
        )
        gain = f"it only saves space ({size(file.bytes)} against {size(base.bytes)})"
        if file.bytes >= base.bytes:
            gain = f"{file.precision} gains nothing here"
        remarks.append(f"{file.file} is {' and '.join(worse)} than {base.file} on this machine{reason}; {gain}.")
    return remarks


def _exported_top1(export: Exported, top1: float | None) -> str:
    if top1 is None:
        return "not run"
    return "withheld" if export.withheld else percent(top1)
