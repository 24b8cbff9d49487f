"""Tests of the report's file and sentences; `test_report_browser.py` opens it."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas.reporting import charts, pages, report, story, tables
from greedynas.reporting.facts import read_facts
from greedynas.reporting.search_charts import best_networks, search_charts
from greedynas.reporting.worth import difference_error, worth
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import count, milliseconds, percent, size
from greedynas.spaces.paths import canonical
from tests.helpers import report_runs as runs

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = {"macs": (["60K"], None)}


@pytest.fixture(scope="module")
def supernet(photos, tmp_path_factory, one_thread):
    return runs.trained(tmp_path_factory.mktemp("report") / "supernet", photos)


@pytest.fixture(scope="module")
def found(supernet, tmp_path_factory):
    """Return a run with searches and without retrained networks."""
    folder = shutil.copytree(supernet, tmp_path_factory.mktemp("report") / "found")
    runs.searched(folder, pool_init=False, **LIMIT)
    runs.searched(folder, **LIMIT)
    return folder


@pytest.fixture(scope="module")
def finished(found, tmp_path_factory):
    folder = shutil.copytree(found, tmp_path_factory.mktemp("report") / "finished")
    runs.add_model(folder, "macs-60K", chosen=True, top1=0.75)
    runs.add_timm(folder, top1=0.82)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


class Page(HTMLParser):
    """A parser of the page that collects tags, text, and the data of the charts, as a browser would."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.text, self._script, self.scripts = [], "", None, []
        self.feed(file.read_text(encoding="utf-8"))
        self.data = json.loads(next(text for kind, text in self.scripts if kind == "application/json"))
        self.figures = self.data["figures"]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append((dict(attributes).get("type"), ""))
        self._script = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._script = None

    def handle_data(self, data):
        if self._script == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._script is None:
            self.text += data

    def has(self, text):
        return " ".join(text.split()) in " ".join(self.text.split())


def written(folder):
    return Page(report.write_report(folder))


def test_a_pool_whose_paths_violate_the_limits_is_not_mentioned(run):
    facts = read_facts(run)
    assert "started from the candidate pool" in story.headline(facts).lead
    runs.change(run / "searches/macs-60K/search.json", from_pool=0)
    facts = read_facts(run)
    assert "candidate pool" not in story.headline(facts).lead
    assert "no path of the pool fits" in str(tables.model_table(facts))


def test_a_search_on_several_supernets_says_so(photos, tmp_path):
    def leads_of(name, **settings):
        folder = runs.trained(tmp_path / name, photos, **settings)
        before = story.headline(read_facts(folder)).lead
        runs.searched(folder, **LIMIT)
        return before, story.headline(read_facts(folder)).lead

    before, after = leads_of("one")
    assert "The supernet was trained with greedy sampling for 4 epochs" in before
    assert "shared weights of one supernet." in after
    moments = {"experimental": {"snapshots": 3}}
    assert "shared weights of one supernet at 3 moments of its training." in leads_of("moments", **moments)[1]
    # A training that stops early has fewer of them than requested.
    early = leads_of("early", stopping=True, alpha=1.0, experimental={"snapshots": 4})[1]
    found = json.loads((tmp_path / "early" / "searches" / "macs-60K" / "search.json").read_text())["supernets"]
    assert 1 < found < 4
    assert f"shared weights of one supernet at {found} moments of its training." in early


def test_a_choice_among_equals_is_described_with_the_network(run):
    file = run / "searches" / "macs-60K" / "search.json"
    chosen = json.loads(file.read_text())["chosen"]
    best = {**chosen["choice"]["best"], "path": [2, 2, 2, 2], "accuracy": 0.875, "macs": 2 * chosen["macs"]}
    among = {"images": 400.0, "margin": 0.0123, "within": 7, "tied": 1, "best": best}
    message = "7 paths on the front lie within one standard error (1.2 points on 400 validation images) of the highest accuracy, 87.5%"
    runs.change(file, chosen={**chosen, "choice": {**chosen["choice"], **among}})
    assert written(run).has(message)
    runs.change(file, chosen={**chosen, "choice": {**chosen["choice"], **among, "within": "many"}})
    with pytest.raises(GreedyNASError, match=r"search.json is malformed: chosen.choice.within"):
        read_facts(run)
    runs.change(file, chosen={key: value for key, value in chosen.items() if key != "choice"})  # of an earlier version
    assert not written(run).has("paths on the front lie")
    # It is not described if `retrain --top` preferred another network to the search's choice.
    runs.change(file, chosen={**chosen, "path": [2, 2, 2, 1], "choice": {**chosen["choice"], **among}})
    assert not written(run).has("paths on the front lie")


def test_a_search_that_chose_by_a_score_says_so(photos, tmp_path):
    folder = runs.trained(tmp_path / "run", photos)
    runs.searched(folder, **LIMIT)
    assert "score" not in story.headline(read_facts(folder)).lead
    shutil.rmtree(folder / "searches")
    plain = (folder / "config.yaml").read_text()
    assert "experimental: {}" in plain
    (folder / "config.yaml").write_text(plain.replace("experimental: {}", "experimental: {additive: 0.5}"))
    runs.searched(folder, settings=("tolerance=0",), **LIMIT)
    facts = read_facts(folder)
    search = facts.search_of(facts.chosen)
    assert "The choice was by a score" in story.headline(facts).lead
    best = max(search.found, key=lambda entry: entry.score)
    assert facts.chosen.arch.path == best.path
    assert best_networks(search, facts.space, 1) == [canonical(best.path, facts.space)]
    table = tables.front_table(search, facts)
    assert table.columns[:2] == ["score", "on the supernet"]
    chart = search_charts(facts)["front_macs"]
    assert chart.figure.layout.yaxis.title.text == "score"
    assert sorted(chart.figure.data[0].y) == sorted(entry.score for entry in search.found)
    assert "blended with an additive model" in chart.caption
    assert "without scores" not in chart.caption
    assert "by score" in search_charts(facts)["ops"].caption
    (folder / "config.yaml").write_text(plain)
    runs.searched(folder, pool_init=False, **LIMIT)
    assert (
        "For a search without scores, the accuracy is drawn." in search_charts(read_facts(folder))["front_macs"].caption
    )


def test_a_finished_run(run):
    page = written(run)
    assert page.has("75.0% top-1 on test images with")
    assert page.has("The budget was at most 60k multiply-adds.")
    search = json.loads((run / "searches" / "macs-60K" / "search.json").read_text())
    assert page.has(f"from {len(search['found'])} paths")
    assert page.has("trained from scratch for 3 epochs and tested once, on 2,000 images")
    assert set(page.figures) == {
        *("per_class", "confusion", "models", "retraining", "front_macs", "accuracies", "generations", "ops"),
        *("supernet_loss", "pool_steadiness", "filtering", "pool_losses"),
    }
    places = [attributes["data-chart"] for _, attributes in page.tags if "data-chart" in attributes]
    assert sorted(places) == sorted(page.figures)
    for name, figure in page.figures.items():
        assert all(len(trace.get("x", ())) and len(trace.get("y", ())) for trace in figure["data"]), name
    assert all(attributes["aria-label"] for _, attributes in page.tags if "data-chart" in attributes)
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert not list(run.glob("*.tmp"))


def test_the_page_loads_nothing_from_the_network(run):
    page = written(run)
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


@pytest.mark.parametrize(
    ("stage", "says", "command"),
    [
        ("supernet", "A supernet of tiny, trained for 4 epochs", "search"),
        ("found", "A network with", "retrain"),
        ("finished", "75.0% top-1", None),
    ],
)
def test_the_report_shows_the_stages_that_are_done(stage, says, command, request, tmp_path):
    run = shutil.copytree(request.getfixturevalue(stage), tmp_path / "run")
    facts = read_facts(run)
    page = written(run)
    assert page.has(says)
    missing = page.has("Not in this report yet")
    assert missing == (command is not None)
    if command is not None:
        assert story.next_command(facts).startswith(f"greedynas {command} {run}")
    assert ("front_macs" in page.figures) == (stage != "supernet")
    assert ("confusion" in page.figures) == (stage == "finished")
    if stage == "found":  # an accuracy on the supernet is always labelled as such
        assert page.has("is not a test accuracy")
        assert "on test images" not in story.headline(facts).title


def test_a_run_that_has_just_started(supernet, tmp_path):
    (tmp_path / "config.yaml").write_bytes((supernet / "config.yaml").read_bytes())
    page = written(tmp_path)
    assert page.figures == {}
    assert page.has("Nothing is trained yet")
    lines = (supernet / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0] + lines[1][:20])  # a line is being written
    page = written(tmp_path)
    assert set(page.figures) == {"supernet_loss"}


def test_numbers_are_those_of_the_run(run):
    page, facts = written(run), read_facts(run)
    search = json.loads((run / "searches" / "macs-60K" / "search.json").read_text())
    evaluated, front, chosen = page.figures["front_macs"]["data"][:3]
    assert evaluated["x"] == [entry["macs"] for entry in search["found"]]
    assert evaluated["y"] == [entry["accuracy"] for entry in search["found"]]
    assert front["y"] == [entry["accuracy"] for entry in search["front"]]
    assert (chosen["x"], chosen["y"]) == ([search["chosen"]["macs"]], [search["chosen"]["supernet_accuracy"]])
    ops = search["chosen"]["ops"]
    assert f"{' '.join(ops[:2])}<br>{' '.join(ops[2:])}" in chosen["text"][0]  # by stage
    violins = page.figures["generations"]["data"]
    assert [trace["name"] for trace in violins] == ["initialised with the pool", "random initialisation"]
    assert violins[0]["x"] == [entry["accuracy"] for entry in search["found"]]
    assert violins[0]["y"] == [entry["generation"] + 1 for entry in search["found"]]
    shares = [sum(trace["y"]) for trace in page.figures["accuracies"]["data"]]
    assert shares == pytest.approx([1, 1], abs=1e-3)
    heat = page.figures["ops"]["data"][0]
    assert [sum(column) for column in zip(*heat["z"], strict=True)] == pytest.approx([1] * 4, abs=1e-3)
    epochs = [
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "epoch"
    ]
    epsilon, pi = page.figures["pool_steadiness"]["data"]
    assert pi["y"] == [line["pi"] for line in epochs if line["pi"] is not None]
    assert page.figures["pool_steadiness"]["layout"]["shapes"][0]["y0"] == 0.1  # α
    assert max(epsilon["y"]) == pytest.approx(0.8, abs=0.01)
    costs = tables.cost_table(facts)
    assert costs.rows[0][-1] == count(epochs[-1]["corrected_images"])
    assert f"{epochs[-1]['optimization_images']:,} optimization" in costs.note
    assert costs.rows[-1][-3:] == ["–", "–", "–"]  # the rival was not found on this supernet
    assert (
        page.figures["confusion"]["data"][0]["text"]
        == json.loads((run / "models/macs-60K/test.json").read_text())["confusion"]
    )


def test_the_best_networks_are_distinct(run):
    facts = read_facts(run)
    search = facts.search_of(facts.chosen)
    best = best_networks(search, facts.space, 5)
    assert len(set(best)) == 5
    assert best == [canonical(path, facts.space) for path in best]
    assert best[0] == canonical(max(search.found, key=lambda entry: entry.accuracy).path, facts.space)


@pytest.mark.parametrize(
    ("rival", "says", "kind"),
    [
        (0.82, "timm-x is better than the found network: 82.0% against 75.0%, 7.0 points more", "better"),
        (0.76, "timm-x is ahead, 76.0% against 75.0%", "ahead"),
        (0.74, "timm-x is behind, 74.0% against 75.0%", "not ahead"),
        (0.60, "timm-x is worse: 60.0% against 75.0%, 15.0 points less", "not ahead"),
        (0.75, "timm-x does as well", "not ahead"),
    ],
)
def test_the_report_names_the_better_network(found, tmp_path, rival, says, kind):
    run = shutil.copytree(found, tmp_path / "run")
    runs.add_model(run, "macs-60K", chosen=True, top1=0.75)
    runs.add_timm(run, "timm-x", top1=rival)
    [verdict] = story.verdicts(read_facts(run))
    assert verdict.text.startswith(says)
    assert verdict.rival == kind
    assert story.lead_verdict(read_facts(run)) == (None if kind == "not ahead" else verdict)
    assert ("can be chance with 2,000 test images" in verdict.text) == (rival in (0.74, 0.76))
    assert "times the multiply-adds" in verdict.text


def test_a_network_found_for_another_budget_is_no_rival_on_the_first_screen(found, tmp_path):
    run = shutil.copytree(found, tmp_path / "run")
    runs.add_model(run, "macs-60K", chosen=True, top1=0.75)
    runs.add_model(run, "macs-60K-no-pool", top1=0.9)
    runs.add_timm(run, "timm-x", top1=0.82)
    facts = read_facts(run)
    assert story.lead_verdict(facts).text.startswith("timm-x is better")
    assert [verdict.rival for verdict in story.verdicts(facts)] == ["better", "better"]


# What the search was worth


def bits(*lengths):
    """Return whether each image is correct: alternating runs of correct and wrong images of the given lengths."""
    return np.repeat([i % 2 == 0 for i in range(len(lengths))], lengths)


def beside(found, folder, own, *others, **arch):
    """Make a run with a found network and random ones, with the images that each of them classifies correctly."""
    run = shutil.copytree(found, folder)
    runs.add_model(run, "macs-60K", chosen=True, correct=own)
    for number, correct in enumerate(others):
        runs.add_model(run, f"random{number or ''}", correct=correct, **{"within": "macs-60K", "macs": 55_000, **arch})
    return run


@pytest.mark.parametrize(
    ("rival", "says"),
    [
        (bits(1500, 500), "has 75.0%: the search was worth 5.0 points (one training each; with 2,000 test images the "),
        (
            bits(1500, 100, 90, 310),
            "has 79.5%: the found network is 0.5 points ahead, a difference that chance can give, so this run does not "
            "show that the search was worth anything (one",
        ),
        (bits(1500, 100, 100, 300), "has 80.0%: the search was worth nothing in this run (one"),
        (
            bits(1500, 100, 110, 290),
            "has 80.5%: the search was worth nothing in this run, and the random network is 0.5 points ahead, a difference "
            "that chance can give (one",
        ),
        (
            bits(1700, 300),
            "has 85.0%: the search was worth nothing in this run, and the random network is better by 5.0 points (one",
        ),
    ],
)
def test_the_report_says_what_the_search_was_worth(found, tmp_path, rival, says):
    run = beside(found, tmp_path / "run", bits(1600, 400), rival)
    message = worth(read_facts(run))
    start = (
        "The found network has 80.0% on the test set; a random network within the same budget, trained the same way,"
    )
    assert message.startswith(f"{start} {says}")
    first_screen = report.write_report(run).read_text().partition('<dl class="tiles">')[0].partition("<body>")[2]
    assert message in first_screen
    assert "random is" not in first_screen  # mentioned once
    assert "drawn at random within the budget of macs-60K" in str(tables.model_table(read_facts(run)).rows)


def test_the_error_of_a_difference_is_that_of_the_same_images(found, tmp_path):
    own, other = bits(1600, 400), bits(1500, 100, 60, 340)
    run = beside(found, tmp_path / "paired", own, other)
    tests = {model.name: model.test for model in read_facts(run).models}
    ahead, behind = 100, 60  # images that only one of them classifies correctly
    paired = math.sqrt(ahead + behind - (ahead - behind) ** 2 / 2000) / 2000
    assert difference_error(tests["macs-60K"], [tests["random"]]) == pytest.approx(paired)
    message = worth(read_facts(run))
    assert f"the standard error of the difference is about {100 * paired:.1f} points" in message
    assert "the search was worth 2.0 points" in message  # 3.2 of these errors
    # Earlier versions did not record which images were correct: the samples then count as independent.
    apart = math.sqrt((0.8 * 0.2 + 0.78 * 0.22) / 2000)
    old = tests["random"].model_copy(update={"correct": None})
    assert difference_error(tests["macs-60K"], [old]) == pytest.approx(apart)
    assert apart > 1.5 * paired
    home = run / "models" / "random"
    runs.write(home / "test.json", {k: v for k, v in runs.read(home / "test.json").items() if k != "correct"})
    message = worth(read_facts(run))
    assert f"about {100 * apart:.1f} points" in message
    assert "the found network is 2.0 points ahead, a difference that chance can give" in message  # 1.6 of these


def test_several_random_networks_are_compared_by_mean_and_spread(found, tmp_path):
    own, low, high = bits(1600, 400), bits(1500, 500), bits(1580, 420)
    run = beside(found, tmp_path / "run", own, low, high)
    message = worth(read_facts(run))
    assert (
        "2 random networks within the same budget, trained the same way, have 77.0% on average (75.0% to 79.0%)"
        in message
    )
    tests = {model.name: model.test for model in read_facts(run).models}
    images = np.std(own - (low.astype(float) + high) / 2) / math.sqrt(2000)
    networks = 0.04 / math.sqrt(2) / math.sqrt(2)
    expected = math.hypot(images, networks)
    assert difference_error(tests["macs-60K"], [tests["random"], tests["random1"]]) == pytest.approx(expected)
    assert "the found network is 3.0 points ahead, a difference that chance can give" in message


@pytest.mark.parametrize(
    "arch",
    [{"within": None}, {"within": "macs-60K-no-pool"}, {"epochs": 30}, {"recipe": "rmsprop"}, {"inherit": True}],
)
def test_the_worth_of_a_search_needs_a_network_of_the_same_budget_and_training(found, tmp_path, arch):
    run = beside(found, tmp_path / "run", bits(1600, 400), bits(1700, 300), **arch)
    facts = read_facts(run)
    assert worth(facts) is None
    assert story.lead_verdict(facts).text.startswith("random is better than the found network")
    assert written(run).has(story.lead_verdict(facts).text)


def test_trainings_are_compared_by_all_their_settings(found, tmp_path):
    run = beside(found, tmp_path / "run", bits(1600, 400), bits(1500, 500))
    asked = {
        "recipe": {"name": "sgd", "lr": 0.1, "log_every": 5},
        "inherit": False,
        "teacher": None,
        "seed": 0,
        "top": 3,
    }
    runs.write(run / "models/macs-60K/retrain.json", asked)
    alike = {**asked, "recipe": {**asked["recipe"], "log_every": 9}, "seed": 1, "top": 1}
    runs.write(run / "models/random/retrain.json", alike)
    assert "was worth 5.0 points" in worth(read_facts(run))
    runs.write(run / "models/random/retrain.json", {**alike, "recipe": {**alike["recipe"], "lr": 0.01}})
    assert worth(read_facts(run)) is None


def test_a_better_rival_of_another_kind_is_named_next_to_the_worth_of_the_search(found, tmp_path):
    run = beside(found, tmp_path / "run", bits(1600, 400), bits(1700, 300))
    runs.add_timm(run, "timm-x", top1=0.83)
    page = written(run)
    assert page.has("timm-x is better than the found network: 83.0% against 80.0%")
    [line] = [data for tag, data in page.tags if data.get("class") == "lead better"]
    assert line is not None


def test_short_trainings_and_files_that_could_not_be_made(run):
    home = run / "models" / "macs-60K"
    search = json.loads((run / "searches" / "macs-60K" / "search.json").read_text())
    first, taken = search["chosen"], {**search["chosen"], "path": [0, 1, 2, 0], "canonical_path": [1, 0, 2, 0]}
    candidates = [{**first, "val_top1": 0.5, "epochs": 1}, {**taken, "val_top1": 0.625, "epochs": 1}]
    runs.write(home / "top.json", {"schema_version": 1, "candidates": candidates})
    for file in (home / "arch.json", run / "arch.json"):
        runs.change(file, path=taken["path"], canonical_path=taken["canonical_path"])
    runs.change(home / "export.json", skipped=[{"file": "model.fp16.onnx", "why": "no such operator"}])
    page = written(run)
    assert page.has("chose 2 from 32 paths")
    assert page.has("Of these it had the highest accuracy on validation images after a short training.")
    table = tables.top_table(read_facts(run).chosen)
    assert table.marked == 1
    assert [row[1] for row in table.rows] == ["50.0%", "62.5%"]
    assert page.has("model.fp16.onnx could not be made: no such operator.")


def test_latency_of_a_table(found, tmp_path):
    run = shutil.copytree(found, tmp_path / "run")
    # Some paths have no latency, because the table lacks one op.
    table = runs.latency_table(run, lack=["MB3_K3_SE"])
    runs.searched(run, table=table, macs=(["70K"], None))
    assert '"latency_ms": null' in (run / "searches" / "macs-70K" / "search.json").read_text()
    page = written(run)
    priced = [e for e in read_facts(run).search_of(read_facts(run).chosen).found if e.latency_ms is not None]
    assert page.figures["latency"]["data"][0]["y"] == [entry.latency_ms for entry in priced]
    assert page.has("timed one by one on abacus with beads, 1 thread")


def test_hostile_strings(run):
    home = runs.add_model(run, "macs-60K", chosen=True, class_names=runs.HOSTILE, samples=8)
    runs.add_model(run, "timm-x", timm=runs.HOSTILE[0], recipe=runs.HOSTILE[1], macs=70_000)
    runs.change(home / "export.json", machine=runs.HOSTILE[0])
    evil = run.parent / "<img src=x onerror=alert(3)>"
    run.rename(evil)
    (evil / "models" / "timm-x").rename(evil / "models" / "<i>x")
    page = written(evil)
    assert [kind for kind, _ in page.scripts] == [None, "application/json", None]  # only the page's own scripts
    assert all(
        attributes.get("src", "data:").startswith("data:image/png") for tag, attributes in page.tags if tag == "img"
    )
    assert not {name for _, attributes in page.tags for name in attributes if name.startswith("on")}
    assert not {"i", "b", "a"} & {tag for tag, attributes in page.tags if "href" not in attributes}
    for name in runs.HOSTILE:
        assert page.has(name)
    raw = (evil / "report.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in raw
    assert page.figures["confusion"]["layout"]["xaxis"]["ticktext"][2].startswith("&lt;b&gt;bold&lt;/b&gt;")
    assert not re.search(r"<(?!/?b>|br>|extra>|/extra>)", json.dumps(page.figures))


@given(
    st.recursive(
        st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_data_cannot_leave_its_script(value):
    text = str(pages.script_data(value))
    assert "<" not in text
    assert json.loads(text) == value


@given(st.text())
def test_text_in_charts_is_literal(text):
    """Check that the escaping of `shown` leaves no tag for plotly to interpret."""
    shown = charts.shown(text)
    assert "<" not in shown
    assert ">" not in shown
    literal = shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    plain = " ".join(text.split())
    assert literal == (plain if len(plain) <= 80 else plain[:79] + "…")


def test_many_classes_paths_and_lines(run):
    """Check that the page is small compared with plotly.js, and that every chart can be drawn."""
    from plotly.offline import get_plotlyjs

    classes = [f"class {i}" for i in range(1000)]
    runs.add_model(run, "macs-60K", chosen=True, class_names=classes, top1=0.5)
    file = run / "searches" / "macs-60K" / "search.json"
    search = json.loads(file.read_text())
    entry = search["found"][0]
    more = [{**entry, "accuracy": i % 1000 / 1000, "generation": i % 5000} for i in range(100_000)]
    runs.write(file, {**search, "found": search["found"] + more, "front": search["front"] + more[:9000]})
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines * 300)
    page = written(run)
    assert (run / "report.html").stat().st_size < len(get_plotlyjs().encode()) + 1_500_000
    points = {name: sum(len(trace["x"]) for trace in figure["data"]) for name, figure in page.figures.items()}
    assert max(points.values()) < 4500, points
    assert page.has("of the 100,064 evaluated paths")
    assert len(page.figures["confusion"]["data"][0]["y"]) == 20
    assert page.has("The 40 classes with the lowest accuracy, of 1,000.")


def good_and_bad():
    nan = math.nan
    model = "models/macs-60K"
    yield "arch.json", {"macs": "many"}, "macs"
    yield f"{model}/arch.json", {"path": [0, 1]}, "a path of tiny has 4 ops"
    yield f"{model}/arch.json", {"path": [0, 1, 99, 0]}, "op index"
    yield f"{model}/arch.json", {"schema_version": 2}, "schema_version"
    yield f"{model}/arch.json", {"image_size": 1}, "image_size"
    yield f"{model}/test.json", {"top1": nan}, "top1"
    yield f"{model}/test.json", {"top1": 87.0}, "top1"
    yield f"{model}/test.json", {"class_names": ["one"]}, "per_class has 3 values for 1 classes"
    yield f"{model}/test.json", {"confusion": [[1, 2], [3]]}, "confusion should have 3 rows"
    yield (
        f"{model}/test.json",
        {"samples": [{"image": "https://example.com/x.png", "label": 0, "predicted": 0, "probability": 1.0}]},
        "image",
    )
    yield (
        f"{model}/test.json",
        {"samples": [{"image": runs.picture(0), "label": 0, "predicted": 7, "probability": 1.0}]},
        "class",
    )
    yield f"{model}/test.json", [], "test.json"
    yield f"{model}/test.json", {"correct": "AAAA"}, "correct has 3 bytes, 2000 bits need 250"
    yield f"{model}/test.json", {"correct": "<b>"}, "correct is not base64"
    yield f"{model}/test.json", {"correct": "AAAA" * 83 + "AA=="}, "correct has 0.0% right images, but top1 is 75.0%"
    yield f"{model}/retrain.json", '{"recipe": 3}', "recipe"
    yield f"{model}/export.json", {"files": {}}, "files"
    yield f"{model}/export.json", {"threads": True}, "threads"
    yield "searches/macs-60K/search.json", {"found": None}, "found"
    yield "searches/macs-60K/search.json", {"space": "mobilenet"}, "is a search of the space 'mobilenet'"
    yield "searches/macs-60K/search.json", {"budget": {"max_macs": -1}}, "budget"
    yield "searches/macs-60K/search.json", {"objectives": ["beauty"]}, "objectives"
    yield (
        "searches/macs-60K/search.json",
        {"found": [{"path": [0], "accuracy": 0.1, "generation": 0, "macs": 1, "params": 1}]},
        "has 4 ops",
    )
    yield "supernet/pool.json", {"path": 1}, "pool.json"
    yield "metrics.jsonl", "not json\n", "metrics.jsonl, line 1"
    yield "metrics.jsonl", '{"kind": "step", "step": 1, "loss": NaN, "lr": 0.1}\n', "line 1 is malformed: loss"
    yield "metrics.jsonl", "\xff\xfe\n", "line 1"
    yield f"{model}/metrics.jsonl", "[]\n", "line 1"
    yield f"{model}/test.json", "[" * 100_000, "test.json"
    yield "config.yaml", "a: [", "config.yaml"
    yield "latency.json", "{}", "latency.json"


@pytest.mark.parametrize(
    ("name", "content", "says"), [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(good_and_bad())]
)
def test_a_malformed_file_is_reported_in_one_line(run, name, content, says):
    file = run / name
    if isinstance(content, str):
        file.write_bytes(content.encode("latin-1"))
    elif isinstance(content, dict) and "json" in name and "pool" not in name:
        runs.change(file, **content)
    else:
        runs.write(file, content)
    with pytest.raises(GreedyNASError) as error:
        report.write_report(run)
    assert "\n" not in str(error.value)
    assert file.name in str(error.value)
    assert says in str(error.value)
    assert len(str(error.value)) < 700
    assert not (run / "report.html").exists()


def test_no_run_and_no_place_to_write(run, tmp_path):
    with pytest.raises(GreedyNASError, match="is not a run directory"):
        report.write_report(tmp_path / "nothing")
    (run / "report.html").mkdir()
    with pytest.raises(GreedyNASError, match="cannot write"):
        report.write_report(run)


def test_the_stage_prints_what_it_wrote(run):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    result = report.report_stage(run, Console(file=out, width=1000))
    assert result["report"] == str(run / "report.html")
    assert result["bytes"] == (run / "report.html").stat().st_size
    assert "75.0% top-1 on test images" in out.getvalue()
    assert str(run / "report.html") in out.getvalue()


def test_numbers_are_readable():
    assert [count(n) for n in (0, 999, 1000, 41_674, 792_744, 999_600, 1_020_000, 369_983_648, 2.4e9)] == [
        *("0", "999", "1k", "41.7k", "793k", "1M", "1.02M", "370M", "2.4G")
    ]
    assert [percent(0.864), percent(1.0), percent(0.0)] == ["86.4%", "100.0%", "0.0%"]
    assert [milliseconds(0.2104), milliseconds(78.96), milliseconds(1234.0)] == ["0.21 ms", "79 ms", "1234 ms"]
    assert [size(0), size(176_000), size(5_084_658)] == ["0 bytes", "176 kB", "5.08 MB"]


def test_the_page_ships_with_the_package():
    from importlib.resources import files

    assert {"report.html", "report.css", "report.js"} <= {
        file.name for file in (files("greedynas.reporting") / "page").iterdir()
    }
