"""The sentences of the report: what was found, how, and how it stands beside its rivals. No claim that the data does not carry."""

import shlex
from dataclasses import dataclass
from typing import Literal

from greedynas.data.copies import withheld_sentence
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.worth import CHANCE, difference_error, random_rivals
from greedynas.rundir.schemas import Search, Tested
from greedynas.runtime.text import cost, count, epochs, milliseconds, percent, points, size
from greedynas.spaces.budget import limits
from greedynas.stages.search_summary import choice_told


@dataclass(frozen=True)
class Headline:
    title: str
    lead: str


@dataclass(frozen=True)
class Verdict:
    """The chosen network against one rival."""

    told: str
    rival: Literal["better", "ahead", "not ahead"]  # ahead: by less than chance may give


def headline(facts: Facts) -> Headline:
    """What a colleague understands in ten seconds."""
    chosen = facts.chosen
    if chosen is not None and chosen.test is not None and chosen.test.withheld:
        lead = [_found(facts, chosen), _tested(chosen, chosen.test)]
        return Headline(f"A network{_with_macs(chosen)} was found, its test accuracy is withheld", _join(lead))
    if chosen is not None and chosen.test is not None:
        lead = [_found(facts, chosen), _tested(chosen, chosen.test)]
        return Headline(f"{percent(chosen.test.top1)} top-1 on test images{_with_macs(chosen)}", _join(lead))
    if chosen is not None:
        lead = [_found(facts, chosen)]
        if chosen.arch.supernet_accuracy is not None:
            lead.append(
                f"With the supernet's weights it has an accuracy of {percent(chosen.arch.supernet_accuracy)} on the "
                "validation images. That ranks paths, it is not a test accuracy: the network is not trained on its own yet."
            )
        return Headline(f"A network{_with_macs(chosen)} was found", _join(lead))
    if facts.training is not None and facts.training.epochs:
        last = facts.training.epochs[-1]
        state = "trained" if last.stopped is not None else "in training"
        lead = [_supernet(facts), "No network has been searched on it yet."]
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
    told = (
        f"{within}. {_searcher(search)} chose it from {len(search.found):,} paths ({networks:,} distinct networks), each "
        f"evaluated with the shared weights of one supernet{moments}."
    )
    if search.has_scores:
        told += " What counted was a score: its accuracy there, blended with what an additive model of all these paths says of it."
    if search.metric == "balanced accuracy":
        told += " Accuracy there is the mean over classes, because rare classes are to count as much as common ones."
    if len(model.top) > 1:
        told = told.replace(" chose it from ", f" chose {len(model.top)} from ")
        told += " Of these it did best on validation images after a short training."
    return told


def averaged_over_classes(facts: Facts) -> bool:
    """Return whether the accuracy of the chosen network on the supernet is a mean over classes."""
    search = facts.search_of(facts.chosen)
    return search is not None and search.metric == "balanced accuracy"


def choice(facts: Facts) -> str | None:
    """Say how the search chose the network among equals, if it is the one that it chose."""
    search = facts.search_of(facts.chosen)
    if search is None or search.chosen is None or facts.chosen is None or facts.chosen.arch.path != search.chosen.path:
        return None
    return choice_told(search.chosen, search.objectives)


def _searcher(search: Search) -> str:
    if search.searcher != "evolution":
        return f"A {search.searcher} search"
    # Where no path of the pool keeps the limits, the search starts from random ones whatever was asked for.
    return "An evolutionary search" + (" started from the candidate pool" if search.from_pool else "")


def _supernet(facts: Facts) -> str:
    if facts.training is None or not facts.training.epochs:
        return ""
    last = facts.training.epochs[-1]
    ended = f" ({last.stopped})" if last.stopped is not None else ""
    return f"The supernet was trained with {facts.config.train.sampler} sampling for {epochs(last.epoch)}{ended}."


def _tested(model: Model, test: Tested) -> str:
    start = "from the supernet's weights on" if model.arch.inherit else "from scratch"
    if model.arch.pretrained:
        start = "from pretrained weights on"
    long = f" for {epochs(model.arch.epochs)}" if model.arch.epochs is not None else ""
    return f"It was then trained {start}{long} and tested once, on {test.images:,} images."


def _with_macs(model: Model) -> str:
    return f" with {cost('macs', model.arch.macs)}" if model.arch.macs is not None else ""


def _join(sentences: list[str]) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def caveats(facts: Facts) -> list[str]:
    """Return the sentences that belong beside the accuracies on the test set, those of the chosen network first."""
    models = [*([facts.chosen] if facts.chosen is not None else []), *facts.models]
    tests = [model.test for model in models if model.test is not None]
    told = [withheld_sentence(test.caveats[:1]) for test in tests if test.withheld]
    told += [_sentence(one) for test in tests for one in test.caveats[1 if test.withheld else 0 :]]
    return [one if one.endswith(".") else f"{one}." for one in dict.fromkeys(told)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def tiles(facts: Facts) -> list[tuple[str, str]]:
    """The numbers of the chosen network, large."""
    chosen = facts.chosen
    if chosen is None:
        return []
    arch, test = chosen.arch, chosen.test
    told: list[tuple[str, str]] = []
    if test is not None and test.withheld:
        told.append(("top-1 on test", "withheld"))
    elif test is not None:
        told.append(("top-1 on test", percent(test.top1)))
        told += [("top-5 on test", percent(test.top5))] if test.top5 is not None else []
        told.append(("average over classes", percent(test.macro)))
    elif arch.supernet_accuracy is not None:
        told.append(("on the supernet (validation)", percent(arch.supernet_accuracy)))
    told += [("multiply-adds", count(arch.macs))] if arch.macs is not None else []
    told += [("parameters", count(arch.params))] if arch.params is not None else []
    told += [("predicted latency", milliseconds(arch.latency_ms))] if arch.latency_ms is not None else []
    onnx = [f for f in (chosen.export.files if chosen.export is not None else ()) if f.file == "model.onnx"]
    told += [("ONNX file", size(onnx[0].bytes))] if onnx else []
    if onnx and onnx[0].latency_ms is not None:
        told.append(("measured latency (ONNX)", milliseconds(onnx[0].latency_ms)))
    return told


def verdicts(facts: Facts) -> list[Verdict]:
    """The chosen network against every other one that was tested, the strongest first."""
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
    """Return what the first screen says of the strongest rival, if it is ahead and no sentence there compares it already."""
    compared = random_rivals(facts)
    rivals = [model for model in _tested_rivals(facts) if model not in compared]
    chosen = facts.chosen
    if chosen is None or chosen.test is None or chosen.test.withheld or not rivals or rivals[0].test is None:
        return None
    verdict = _verdict(chosen, chosen.test, rivals[0], rivals[0].test)
    return None if verdict.rival == "not ahead" else verdict


def _verdict(chosen: Model, own: Tested, rival: Model, other: Tested) -> Verdict:
    difference = round(other.top1, 3) - round(own.top1, 3)  # as it is printed
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
    """Where predicted latencies come from, and what was measured of the chosen network."""
    told = []
    if (table := facts.latency) is not None:
        threads = f", {table.threads} thread{'s' if table.threads != 1 else ''}" if table.threads is not None else ""
        told.append(f"Blocks were timed one by one on {table.device} with {table.backend}{threads}.")
        if table.fit is not None:
            told.append(
                f"Their sums differed by {percent(table.fit.median_error)} (median) from the latencies of the "
                f"{table.fit.networks} whole networks that were timed to fit the table."
            )
    chosen = facts.chosen
    if chosen is not None and chosen.arch.latency_ms is not None:
        told.append(f"Predicted for {chosen.name}: {milliseconds(chosen.arch.latency_ms)}.")
        measured = [f for f in (chosen.export.files if chosen.export is not None else ()) if f.file == "model.onnx"]
        if chosen.export is not None and measured and measured[0].latency_ms is not None:
            told.append(f"Its ONNX file took {milliseconds(measured[0].latency_ms)} on {chosen.export.machine}.")
    return _join(told)


def next_command(facts: Facts) -> str | None:
    """What to run next, if anything is missing."""
    steps = missing(facts)
    return steps[0][1] if steps else None


def missing(facts: Facts) -> list[tuple[str, str]]:
    """(what the report does not have yet, the command that adds it), in the order of the stages."""
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
