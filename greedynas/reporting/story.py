"""The sentences of the report: what was found, how, and how it compares with its rivals."""

import shlex
from dataclasses import dataclass
from typing import Literal

from greedynas.data.copies import withheld_sentence
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.worth import CHANCE, difference_error, random_rivals
from greedynas.rundir.schemas import Search, Tested
from greedynas.runtime.text import cost, count, duration, epochs, milliseconds, percent, points, size
from greedynas.spaces.budget import limits
from greedynas.stages.search_summary import describe_choice


@dataclass(frozen=True)
class Headline:
    title: str
    lead: str


@dataclass(frozen=True)
class Verdict:
    """The comparison of the chosen network with one rival."""

    text: str
    rival: Literal["better", "ahead", "not ahead"]  # ahead: by no more than can be chance


def headline(facts: Facts) -> Headline:
    """Return the title and the lead of the report, which summarise the run in a few seconds of reading."""
    chosen = facts.chosen
    if chosen is not None and chosen.test is not None and chosen.test.withheld:
        lead = [_found(facts, chosen), _tested(chosen, chosen.test)]
        return Headline(f"A network{_with_macs(chosen)} was found; its test accuracy is withheld", _join(lead))
    if chosen is not None and chosen.test is not None:
        lead = [_found(facts, chosen), _tested(chosen, chosen.test)]
        return Headline(f"{percent(chosen.test.top1)} top-1 on test images{_with_macs(chosen)}", _join(lead))
    if chosen is not None:
        lead = [_found(facts, chosen)]
        if chosen.arch.supernet_accuracy is not None:
            lead.append(
                f"With the supernet's weights it has an accuracy of {percent(chosen.arch.supernet_accuracy)} on the "
                "validation images. This accuracy ranks paths and is not a test accuracy, because the network has not been "
                "trained on its own yet."
            )
        return Headline(f"A network{_with_macs(chosen)} was found", _join(lead))
    if facts.training is not None and facts.training.epochs:
        last = facts.training.epochs[-1]
        state = "trained" if last.stopped is not None else "in training"
        lead = [_supernet(facts), "No search has been run on it yet."]
        return Headline(f"A supernet of {facts.space.name}, {state} for {epochs(last.epoch)}", _join(lead))
    return Headline(f"A run on the space {facts.space.name}, just started", "Nothing is trained yet.")


def _found(facts: Facts, model: Model) -> str:
    search = facts.search_of(model)
    if search is None:
        return f"The timm model {model.arch.timm}." if model.arch.timm is not None else "A known network."
    budget = limits(search.budget)
    within = f"The budget was {budget}" if budget else "There was no limit on its cost"
    networks = facts.networks[search.name]
    moments = f" at {search.supernets} moments of its training" if search.supernets > 1 else ""
    text = (
        f"{within}. {_searcher(search)} chose it from {len(search.found):,} paths ({networks:,} distinct networks), "
        f"each evaluated with the shared weights of one supernet{moments}."
    )
    if search.searcher == "derivation":
        reach = " within it" if budget else ""
        text = f"{within}. It is the most probable path{reach} by the probabilities that {facts.config.train.sampler} has learned."
    if search.has_scores:
        text += (
            " The choice was by a score in which an experiment of this run replaces or blends the accuracy "
            f"({', '.join(facts.config.experimental)})."
        )
    if search.unfinished_epochs is not None:
        text += (
            f" The supernet was not fully trained then (step {search.supernet_step or 0:,}, "
            f"{epochs(search.unfinished_epochs)}): this choice is preliminary."
        )
    if search.metric == "balanced accuracy":
        text += " The search compared accuracies that are means over classes, so that rare classes count as much as common ones."
    if len(model.top) > 1:
        text = text.replace(" chose it from ", f" chose {len(model.top)} from ")
        text += " Of these it had the highest accuracy on validation images after a short training."
    return text


def averaged_over_classes(facts: Facts) -> bool:
    """Return whether the accuracy of the chosen network on the supernet is a mean over classes."""
    search = facts.search_of(facts.chosen)
    return search is not None and search.metric == "balanced accuracy"


def choice(facts: Facts) -> str | None:
    """Describe how the search chose the network among equals, if the chosen network is the choice of its search."""
    search = facts.search_of(facts.chosen)
    if search is None or search.chosen is None or facts.chosen is None or facts.chosen.arch.path != search.chosen.path:
        return None
    return describe_choice(search.chosen, search.objectives)


def _searcher(search: Search) -> str:
    if search.searcher == "derivation":
        return "The derivation"
    if search.searcher != "evolution":
        return f"A{'n' * (search.searcher[0] in 'aeio')} {search.searcher} search"
    # If no path of the pool keeps the limits, the search starts from random paths in any case.
    return "An evolutionary search" + (" started from the candidate pool" if search.from_pool else "")


def _supernet(facts: Facts) -> str:
    if facts.training is None or not facts.training.epochs:
        return ""
    last = facts.training.epochs[-1]
    ended = f" ({last.stopped})" if last.stopped is not None else ""
    return f"The supernet was trained with {facts.config.train.sampler} sampling for {epochs(last.epoch)}{ended}."


def _tested(model: Model, test: Tested) -> str:
    start = "from the supernet's weights" if model.arch.inherit else "from scratch"
    if model.arch.pretrained:
        start = "from pretrained weights"
    long = f" for {epochs(model.arch.epochs)}" if model.arch.epochs is not None else ""
    return f"It was then trained {start}{long} and tested once, on {test.images:,} images."


def _with_macs(model: Model) -> str:
    return f" with {cost('macs', model.arch.macs)}" if model.arch.macs is not None else ""


def _join(sentences: list[str]) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def caveats(facts: Facts) -> list[str]:
    """Return the caveats of the accuracies on the test set as sentences, those of the chosen network first."""
    models = [*([facts.chosen] if facts.chosen is not None else []), *facts.models]
    tests = [model.test for model in models if model.test is not None]
    sentences = [withheld_sentence(test.caveats[:1]) for test in tests if test.withheld]
    sentences += [_sentence(one) for test in tests for one in test.caveats[1 if test.withheld else 0 :]]
    return [one if one.endswith(".") else f"{one}." for one in dict.fromkeys(sentences)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def tiles(facts: Facts) -> list[tuple[str, str]]:
    """Return the large numbers of the chosen network with their labels."""
    chosen = facts.chosen
    if chosen is None:
        return []
    arch, test = chosen.arch, chosen.test
    numbers: list[tuple[str, str]] = []
    if test is not None and test.withheld:
        numbers.append(("top-1 on test", "withheld"))
    elif test is not None:
        numbers.append(("top-1 on test", percent(test.top1)))
        numbers += [("top-5 on test", percent(test.top5))] if test.top5 is not None else []
        numbers.append(("average over classes", percent(test.macro)))
    elif arch.supernet_accuracy is not None:
        numbers.append(("on the supernet (validation)", percent(arch.supernet_accuracy)))
    numbers += [("multiply-adds", count(arch.macs))] if arch.macs is not None else []
    numbers += [("parameters", count(arch.params))] if arch.params is not None else []
    numbers += [("predicted latency", milliseconds(arch.latency_ms))] if arch.latency_ms is not None else []
    onnx = [f for f in (chosen.export.files if chosen.export is not None else ()) if f.file == "model.onnx"]
    numbers += [("ONNX file", size(onnx[0].bytes))] if onnx else []
    if onnx and onnx[0].latency_ms is not None:
        numbers.append(("measured latency (ONNX)", milliseconds(onnx[0].latency_ms)))
    return [*numbers, *_total_time(facts)]


def _total_time(facts: Facts) -> list[tuple[str, str]]:
    return [] if facts.seconds is None else [("time of all stages", duration(facts.seconds))]


def verdicts(facts: Facts) -> list[Verdict]:
    """Compare the chosen network with every other tested one, and return the verdicts, the strongest rival first."""
    chosen = facts.chosen
    if chosen is None or chosen.test is None or chosen.test.withheld:
        return []
    rivals = _tested_rivals(facts)
    return [_verdict(chosen, chosen.test, rival, rival.test) for rival in rivals if rival.test is not None]


def _tested_rivals(facts: Facts) -> list[Model]:
    tested = [model for model in facts.models if model is not facts.chosen and model.test is not None]
    rivals = [model for model in tested if not model.test.withheld]  # type: ignore[union-attr]
    rivals.sort(key=lambda model: -model.test.top1)  # type: ignore[union-attr]
    return rivals


def lead_verdict(facts: Facts) -> Verdict | None:
    """Return the verdict on the strongest rival for the first screen, if it is ahead and not yet compared there.

    Networks that other searches of the run found are no rivals: they belong to other budgets.
    """
    others = [*random_rivals(facts), *_found_by_other_searches(facts)]
    rivals = [model for model in _tested_rivals(facts) if model not in others]
    chosen = facts.chosen
    if chosen is None or chosen.test is None or chosen.test.withheld or not rivals or rivals[0].test is None:
        return None
    verdict = _verdict(chosen, chosen.test, rivals[0], rivals[0].test)
    return None if verdict.rival == "not ahead" else verdict


def _found_by_other_searches(facts: Facts) -> list[Model]:
    searched = {search.name for search in facts.searches}
    return [model for model in facts.models if model is not facts.chosen and model.name in searched]


def _verdict(chosen: Model, own: Tested, rival: Model, other: Tested) -> Verdict:
    difference = round(other.top1, 3) - round(own.top1, 3)  # as the page shows it
    margin = CHANCE * difference_error(own, [other])
    numbers = f"{percent(other.top1)} against {percent(own.top1)}"
    price = _price(chosen, rival)
    if difference == 0:
        return Verdict(f"{rival.name} does as well: {percent(own.top1)}{price}.", "not ahead")
    if abs(difference) <= margin:
        ahead = "is ahead" if difference > 0 else "is behind"
        return Verdict(
            f"{rival.name} {ahead}, {numbers}{price}; a difference of {points(abs(difference))} can be chance with "
            f"{other.images:,} test images.",
            "ahead" if difference > 0 else "not ahead",
        )
    if difference > 0:
        it = "the found network" if chosen.arch.supernet_accuracy is not None else chosen.name
        return Verdict(f"{rival.name} is better than {it}: {numbers}, {points(difference)} more{price}.", "better")
    return Verdict(f"{rival.name} is worse: {numbers}, {points(-difference)} less{price}.", "not ahead")


def _price(chosen: Model, rival: Model) -> str:
    own, other = chosen.arch.macs, rival.arch.macs
    if not own or not other:
        return ""
    ratio = other / own
    if 0.98 < ratio < 1.02:
        return ", with about as many multiply-adds"
    return f", with {ratio:.2g} times the multiply-adds"


def latency_note(facts: Facts) -> str:
    """Describe where predicted latencies come from, and the measured latency of the chosen network."""
    sentences = []
    if (table := facts.latency) is not None:
        threads = f", {table.threads} thread{'s' if table.threads != 1 else ''}" if table.threads is not None else ""
        sentences.append(f"Blocks were timed one by one on {table.device} with {table.backend}{threads}.")
        if table.fit is not None:
            sentences.append(
                f"Their sums differed by {percent(table.fit.median_error)} (median) from the latencies of the "
                f"{table.fit.networks} whole networks that were timed to fit the table."
            )
    chosen = facts.chosen
    if chosen is not None and chosen.arch.latency_ms is not None:
        sentences.append(f"Predicted for {chosen.name}: {milliseconds(chosen.arch.latency_ms)}.")
        measured = [f for f in (chosen.export.files if chosen.export is not None else ()) if f.file == "model.onnx"]
        if chosen.export is not None and measured and measured[0].latency_ms is not None:
            sentences.append(f"Its ONNX file took {milliseconds(measured[0].latency_ms)} on {chosen.export.machine}.")
    return _join(sentences)


def next_command(facts: Facts) -> str | None:
    """Return the command to run next, or None if no stage is missing."""
    steps = missing(facts)
    return steps[0][1] if steps else None


def missing(facts: Facts) -> list[tuple[str, str]]:
    """Return the missing parts of the report with the commands that add them, in the order of the stages."""
    run, chosen = shlex.quote(str(facts.folder)), facts.chosen
    if facts.training is None or not facts.training.epochs or facts.training.epochs[-1].stopped is None:
        return [("the end of supernet training", f"greedynas train {shlex.quote(facts.config.name)} --out {run}")]
    absent = []
    if not facts.searches:
        absent.append(("a search", f"greedynas search {run} --flops …"))
    if chosen is None or chosen.test is None:
        absent.append(("training of the found network and its test", f"greedynas retrain {run}"))
    if chosen is None or chosen.export is None:
        absent.append(("exported files", f"greedynas export {run}"))
    return absent
