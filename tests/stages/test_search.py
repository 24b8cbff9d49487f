"""Tests of searches by the command line, on a run directory with a small trained supernet."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from scipy import stats

from greedynas.experimental.additive import Blended
from greedynas.greedy import validation
from greedynas.greedy.settings import SearchSettings
from greedynas.greedy.validation import SupernetAccuracies
from greedynas.spaces.budget import Budget
from greedynas.stages import search
from greedynas.stages.network_choice import choose_target, found_targets
from greedynas.stages.run import read_run_config
from greedynas.stages.search import default_name
from tests.helpers.latency import made_up
from tests.helpers.search import DATA, console
from tests.helpers.training import SETTINGS, new_net, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--set", "population=6", "--set", "generations=4"]


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """Make a finished run, in copies of which the tests search."""
    from greedynas.settings.schema import Config
    from greedynas.stages.train import train_stage

    folder = tmp_path_factory.mktemp("trained") / "run"
    config = Config(name="tiny", space=tiny_space(), data={**DATA, "source": str(photos)}, train=SETTINGS)
    train_stage(config, folder, console())
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def search_of(run, name):
    return json.loads((run / "searches" / name / "search.json").read_text())


def test_a_search_under_a_budget(run_cli, run):
    code, out, err = run_cli("search", run, "--flops", "60K", *SMALL)
    assert (code, err) == (0, "")
    assert "macs-60K" in out
    result = search_of(run, "macs-60K")
    space = tiny_space()
    paths = [tuple(entry["path"]) for entry in result["found"]]
    assert len(paths) == len(set(paths)) == 24
    costs = space.costs(paths)
    assert costs.macs.max() <= 60_000
    assert [entry["macs"] for entry in result["found"]] == costs.macs.tolist()
    assert [entry["generation"] for entry in result["found"]] == [g for g in range(4) for _ in range(6)]
    best = min(result["found"], key=lambda entry: (-entry["accuracy"], entry["macs"]))
    arch = json.loads((run / "arch.json").read_text())
    assert arch == json.loads((run / "models" / "macs-60K" / "arch.json").read_text())
    assert {**arch, "choice": result["chosen"]["choice"]} == result["chosen"]
    assert {"space", "path", "canonical_path", "ops", "macs", "params", "supernet_accuracy"} <= set(arch)
    assert result["chosen"]["choice"]["best"] == best
    chosen = [(entry["path"], entry["accuracy"]) for entry in result["front"] if entry["path"] == arch["path"]]
    assert chosen == [(arch["path"], arch["supernet_accuracy"])]
    pool = json.loads((run / "supernet" / "pool.json").read_text())
    feasible = [entry["path"] for entry in pool if space.costs([entry["path"]]).macs[0] <= 60_000]
    assert result["from_pool"] == min(len(feasible), 6)
    assert [list(path) for path in paths[: result["from_pool"]]] == feasible[:6]
    assert f"{result['from_pool']} paths of the first generation from the pool" in (run / "log.txt").read_text()


def test_a_score_that_is_partly_an_additive_model(run_cli, run):
    assert run_cli("search", run, "--flops", "60K", *SMALL)[0] == 0
    config = run / "config.yaml"
    assert "experimental: {}" in config.read_text()
    config.write_text(config.read_text().replace("experimental: {}", "experimental: {additive: 0.5}"))
    code, out, err = run_cli("search", run, "--front", "--flops", "60K", "--name", "steady", "--set", "tolerance=0", *SMALL)  # fmt: skip
    assert (code, err) == (0, "")
    assert out.count(" score ") == 2  # of the chosen network and of the front
    plain, steady = search_of(run, "macs-60K"), search_of(run, "steady")
    assert [(e["path"], e["accuracy"]) for e in steady["found"]] == [(e["path"], e["accuracy"]) for e in plain["found"]]
    assert "score" not in plain["found"][0]
    accuracies = np.array([entry["accuracy"] for entry in steady["found"]])
    scores = Blended(0.5)([entry["path"] for entry in steady["found"]], accuracies)
    assert [entry["score"] for entry in steady["found"]] == pytest.approx(scores)
    best = steady["found"][int(scores.argmax())]
    chosen = steady["chosen"]
    assert (chosen["path"], chosen["supernet_accuracy"]) == (best["path"], best["accuracy"])
    assert chosen["score"] == pytest.approx(scores.max())
    assert best["path"] in [entry["path"] for entry in steady["front"]]
    # The next candidates of `retrain --top` are the next best ones by score.
    targets = found_targets(run, choose_target(run, read_run_config(run), "steady", None, None, None))
    found = {tuple(entry["path"]): entry["score"] for entry in steady["found"]}
    order = [found[target.path] for target in targets]
    assert order == sorted(order, reverse=True)


def test_a_second_opinion_reorders_the_same_paths(run_cli, run):
    assert run_cli("search", run, "--flops", "60K", *SMALL)[0] == 0
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("experimental: {}", "experimental: {second_opinion: 0.5}"))
    for _ in range(2):  # the second time it is read, not evaluated
        code, _, err = run_cli("search", run, "--flops", "60K", "--name", "asked", "--set", "tolerance=0", *SMALL)
        assert (code, err) == (0, "")
    plain, asked = search_of(run, "macs-60K"), search_of(run, "asked")
    assert [(e["path"], e["accuracy"]) for e in asked["found"]] == [(e["path"], e["accuracy"]) for e in plain["found"]]
    assert {entry["score"] for entry in asked["found"]} <= {entry["accuracy"] for entry in plain["found"]}
    assert [e["score"] for e in asked["found"]] != [e["accuracy"] for e in asked["found"]]
    assert asked["chosen"]["score"] == max(entry["score"] for entry in asked["found"])


def test_validation_images_of_all_classes_share_batchnorm_statistics(data):
    """Check that every third image goes into one chunk of four, although the images are ordered by class."""
    assert data.val.labels.tolist() == sorted(data.val.labels.tolist())
    net = new_net()
    paths = list(itertools.product(range(3), repeat=4))[::4]
    images, labels = data.val.eval_batch()
    evaluate = SupernetAccuracies(net, data, SearchSettings(bn="batch", bn_images=4), 0, "fp32")
    rows = torch.arange(12)

    def plainly(chunks):
        """Return accuracies path by path, each of a separate network whose BatchNorm uses the statistics of a chunk."""
        networks = [net.subnet(path).train() for path in paths]
        with torch.no_grad():
            hits = [[network(images[chunk]).argmax(1) == labels[chunk] for chunk in chunks] for network in networks]
        return [torch.cat(right).double().mean().item() for right in hits]

    interleaved, contiguous = plainly([rows[first::3] for first in range(3)]), plainly(rows.split(4))
    assert evaluate(paths) == pytest.approx(interleaved)
    differ = ~np.isclose(interleaved, contiguous)
    assert differ.mean() > 0.5  # otherwise nothing is tested


# The choice of the network

CHEAP, MIDDLE, FULL = (0, 0, 0, 0), (0, 1, 0, 1), (2, 2, 2, 2)
ACCURACY = {
    CHEAP: 0.75,
    MIDDLE: 9.5 / 12,
    FULL: 10 / 12,
}  # with 12 images, the standard error is about one and a half images


@pytest.fixture
def made_up_accuracies(monkeypatch):
    """Give all paths but three an accuracy of 0, and return the list that receives the evaluated paths."""
    asked = []

    def accuracies(self, paths):
        asked.extend(paths)
        return [ACCURACY.get(tuple(path), 0.0) for path in paths]

    monkeypatch.setattr(SupernetAccuracies, "__call__", accuracies)
    return asked


EVERYTHING = ["--searcher", "random", "--name", "mine", "--set", "population=81", "--set", "generations=1"]


def test_the_cheapest_network_within_the_error_of_the_best_is_chosen(run_cli, run, made_up_accuracies):
    code, out, err = run_cli("search", run, *EVERYTHING)
    assert (code, err) == (0, "")
    result = search_of(run, "mine")
    assert len(result["found"]) == 81
    macs = dict(zip(ACCURACY, tiny_space().costs(list(ACCURACY)).macs.tolist(), strict=True))
    interval = stats.binomtest(10, 12).proportion_ci(math.erf(math.sqrt(0.5)), method="wilson")
    assert interval.low < min(ACCURACY[MIDDLE], ACCURACY[CHEAP])  # both are within the error
    chosen = result["chosen"]
    assert (tuple(chosen["path"]), chosen["supernet_accuracy"], chosen["macs"]) == (CHEAP, 0.75, macs[CHEAP])
    choice = chosen["choice"]
    assert choice["margin"] == pytest.approx(10 / 12 - interval.low)
    assert (choice["tolerance"], choice["images"], choice["tied"], choice["within"]) == (1.0, 12.0, 1, 3)
    best = choice["best"]
    assert (tuple(best["path"]), best["accuracy"], best["macs"]) == (FULL, 10 / 12, macs[FULL])
    assert best in result["found"]
    text = f"3 paths on the front lie within one standard error ({100 * choice['margin']:.1f} points on 12 validation images)"
    assert text in " ".join(out.split())
    assert text in (run / "log.txt").read_text()
    assert json.loads((run / "arch.json").read_text())["path"] == list(CHEAP)
    # The first candidate of `retrain --top` is the chosen one; the others follow by accuracy, then by cost.
    targets = found_targets(run, choose_target(run, read_run_config(run), None, None, None, None))
    assert [target.path for target in targets[:3]] == [CHEAP, FULL, MIDDLE]
    rest = tiny_space().costs([target.path for target in targets[3:]]).macs
    assert (np.diff(rest) >= 0).all()
    assert len(rest) > 10


def test_another_tolerance_chooses_again_from_what_was_evaluated(run_cli, run, made_up_accuracies):
    assert run_cli("search", run, *EVERYTHING)[0] == 0
    whole = search_of(run, "mine")
    del made_up_accuracies[:]
    code, out, _ = run_cli("search", run, *EVERYTHING, "--set", "tolerance=0")
    assert (code, made_up_accuracies) == (0, [])
    again = search_of(run, "mine")
    assert again["found"] == whole["found"]
    assert (again["settings"]["tolerance"], again["chosen"]["choice"]["tolerance"]) == (0, 0)
    assert tuple(again["chosen"]["path"]) == FULL
    assert "chosen, with" not in out
    for file in (run / "arch.json", run / "models" / "mine" / "arch.json"):
        assert json.loads(file.read_text())["path"] == list(FULL)
    assert run_cli("search", run, *EVERYTHING)[0] == 0
    assert {**search_of(run, "mine"), "seconds": 0} == {**whole, "seconds": 0}
    # A network whose training has started is not replaced.
    (run / "models" / "mine" / "retrain.json").write_text("{}")
    before = {file: file.read_bytes() for file in run.rglob("*.json")}
    code, _, err = run_cli("search", run, *EVERYTHING, "--set", "tolerance=0")
    assert (code, err.count("\n")) == (2, 1)
    assert "search under another --name" in err
    assert {file: file.read_bytes() for file in run.rglob("*.json")} == before


def test_the_choice_of_an_older_version_is_kept(run_cli, run, made_up_accuracies):
    assert run_cli("search", run, *EVERYTHING, "--set", "tolerance=0")[0] == 0
    file = run / "searches" / "mine" / "search.json"
    older = json.loads(file.read_text())
    del older["settings"]["tolerance"], older["chosen"]["choice"]
    file.write_text(json.dumps(older))
    for _ in range(2):
        assert run_cli("search", run, *EVERYTHING)[0] == 0
        assert search_of(run, "mine")["chosen"] == older["chosen"]
    assert run_cli("search", run, *EVERYTHING, "--set", "tolerance=0.9")[0] == 0
    assert tuple(search_of(run, "mine")["chosen"]["path"]) == CHEAP


def test_ties_are_reported(run_cli, run, made_up_accuracies, monkeypatch):
    monkeypatch.setitem(ACCURACY, CHEAP, 10 / 12)
    monkeypatch.setitem(ACCURACY, MIDDLE, 10 / 12)
    code, out, _ = run_cli("search", run, *EVERYTHING)
    assert code == 0
    assert "3 paths tie at the highest accuracy, 83.3%; the cheapest of them was chosen." in " ".join(out.split())
    chosen = search_of(run, "mine")["chosen"]
    assert (tuple(chosen["path"]), chosen["choice"]["tied"], chosen["choice"]["within"]) == (CHEAP, 3, 1)


def test_a_family_a_front_and_random_search(run_cli, run):
    code, out, _ = run_cli("search", run, "--flops", "60K", "--flops", "50K", "--json", *SMALL)
    assert code == 0
    family = json.loads(out)["searches"]
    assert [result["name"] for result in family] == ["macs-60K", "macs-50K"]
    assert all(result["chosen"]["macs"] <= limit for result, limit in zip(family, (60_000, 50_000), strict=True))
    code, out, _ = run_cli("search", run, "--front", "--objectives", "macs,params", *SMALL)
    assert code == 0
    front = search_of(run, "front-macs-params")
    assert front["objectives"] == ["macs", "params"]
    for one in front["front"]:
        assert not any(
            other["accuracy"] >= one["accuracy"]
            and other["macs"] <= one["macs"]
            and other["params"] <= one["params"]
            and other != one
            and (other["accuracy"], other["macs"], other["params"]) != (one["accuracy"], one["macs"], one["params"])
            for other in front["found"]
        )
    code, _, _ = run_cli("search", run, "--params", "3K", "--min-params", "1K", "--searcher", "random", *SMALL)
    assert code == 0
    assert len(search_of(run, "params-1K-3K-random")["found"]) == 24


def test_every_limit_of_the_command_line_is_kept(run_cli, run, made_up_accuracies):
    """Check each limit alone and one of each kind together; each excludes paths that the others allow."""
    space = tiny_space()
    tables, table = {**space.cost_tables, "latency_ms": made_up(space).cost_table(space)}, run.parent / "table.json"
    made_up(space).save(table)
    every = np.array(list(itertools.product(range(3), repeat=4)))
    costs = {name: tables[name](every) for name in tables}
    options = {"macs": "flops", "params": "params", "latency_ms": "latency"}
    bounds = {
        name: [float(np.quantile(values, share, method="nearest")) for share in (0.1, 0.7)]
        for name, values in costs.items()
    }

    def searched(wanted):
        """Return the paths that a search under these limits evaluates; it is large enough to find all of them."""
        command = [f"--{'min-' * (end == 0)}{options[name]}={bounds[name][end]:.9f}" for name, end in wanted]
        sizes = ["--set", "population=81", "--set", "generations=3"]
        name = "-".join(f"{name}-{end}" for name, end in wanted)
        code, _, err = run_cli("search", run, *command, "--latency-table", table, "--name", name, *sizes)
        assert (code, err) == (0, "")
        return {tuple(entry["path"]) for entry in search_of(run, name)["found"]}

    def feasible(wanted):
        kept = [costs[name] <= bounds[name][1] if end else costs[name] >= bounds[name][0] for name, end in wanted]
        return {tuple(path) for path in every[np.logical_and.reduce(kept)].tolist()}

    single = [[(name, end)] for name in costs for end in (0, 1)]
    for wanted in (*single, [("macs", 1), ("params", 1), ("latency_ms", 1)]):
        assert searched(wanted) == feasible(wanted)
        assert len(feasible(wanted)) < 81
    everything = [(name, 1) for name in costs]
    assert all(feasible(everything) < feasible([one for one in everything if one != left]) for left in everything)


@pytest.mark.parametrize("searcher", ["evolution", "random"])
def test_interrupted_and_resumed_equals_uninterrupted(run_cli, run, tmp_path, searcher, monkeypatch):
    whole = shutil.copytree(run, tmp_path / "whole")
    command = ["--flops", "60K", "--searcher", searcher, *SMALL]
    assert run_cli("search", whole, *command)[0] == 0
    name = "macs-60K" if searcher == "evolution" else "macs-60K-random"

    class Killed(BaseException):
        pass

    real, calls = SupernetAccuracies.__call__, []

    def dying(self, paths):
        calls.append(len(paths))
        if len(calls) == 3:
            raise Killed
        return real(self, paths)

    with monkeypatch.context() as patch:
        patch.setattr(SupernetAccuracies, "__call__", dying)
        with pytest.raises(Killed):
            search.search_stage(run, requests_of(run, searcher), None, console())
    assert len(search_of(run, name)["found"]) == 12
    assert run_cli("search", run, *command)[0] == 0
    first, second = search_of(whole, name), search_of(run, name)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def requests_of(run, searcher):
    limits = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}
    return search.make_requests(run, limits, searcher, (), True, None, ["population=6", "generations=4"], None)


def test_the_searcher_of_the_settings_is_used_but_not_for_fronts(run_cli, run):
    small = [*SMALL, "--set", "searcher=local"]
    assert run_cli("search", run, "--flops", "60K", *small)[0] == 0
    assert search_of(run, "macs-60K")["searcher"] == "local"
    assert run_cli("search", run, "--flops", "60K", "--searcher", "evolution", *small)[0] == 0
    assert search_of(run, "macs-60K-evolution")["searcher"] == "evolution"
    assert run_cli("search", run, "--front", *small)[0] == 0
    assert search_of(run, "front-macs")["searcher"] == "evolution"
    code, _, err = run_cli("search", run, "--set", "searcher=nosuch")
    assert (code, err.count("\n")) == (2, 1)
    assert "unknown searcher 'nosuch'" in err


def test_a_latency_limit_excludes_paths_without_a_latency(run_cli, run):
    table = run.parent / "table.json"
    prices = made_up(tiny_space(), lack=["MB2_K3"])
    prices.save(table)
    cheapest, dearest = prices.cost_table(tiny_space()).range
    limit = (cheapest + dearest) / 2
    command = ["--latency", f"{limit}ms", "--latency-table", table, "--name", "quick", *SMALL]
    code, out, err = run_cli("search", run, *command)
    assert (code, err) == (0, "")
    assert "% of all paths use an op that" in out
    result = search_of(run, "quick")
    assert result["found"]
    assert all(entry["latency_ms"] <= limit for entry in result["found"])
    assert not any(1 in entry["path"] for entry in result["found"])  # MB2_K3
    assert "latency_ms" in json.loads((run / "arch.json").read_text())
    code, _, err = run_cli("search", run, "--latency", f"{cheapest / 2}ms", "--latency-table", table)
    assert (code, err.count("\n")) == (2, 1)
    assert "the cheapest path has" in err


def test_each_path_is_evaluated_once_over_a_family(run, monkeypatch):
    evaluated = []
    real = validation.evaluate_batches

    def counting(net, paths, *arguments, **options):
        evaluated.extend(paths)
        return real(net, paths, *arguments, **options)

    monkeypatch.setattr(validation, "evaluate_batches", counting)
    limits = {"macs": (["60K", "55K", "50K"], None), "params": (None, None), "latency_ms": (None, None)}
    requests = search.make_requests(run, limits, "evolution", (), True, None, ["population=6", "generations=4"], None)
    search.search_stage(run, requests, None, console())
    assert 0 < len(evaluated) == len(set(evaluated)) < 72


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flops", "1K"], "the cheapest path has"),
        (["--flops", "lots"], "cannot read 'lots'"),
        (["--flops", "50K", "--min-flops", "60K"], "contradictory limits on macs"),
        (["--flops", "50K", "--flops", "60K", "--params", "1K", "--params", "2K"], "only one kind"),
        (["--latency", "80ms"], "latency table"),
        (["--searcher", "bayes"], "unknown searcher"),
        (["--front", "--objectives", "beauty"], "unknown objective"),
        (["--flops", "60K", "--name", "../up"], "--name"),
        (["--flops", "60K", "--set", "train.lr=1"], "fixed in this run"),
        (["--flops", "60K", "--set", "additive=0.5"], "experimental.additive is fixed in this run"),
        (["--flops", "60K", "--set", "bn=none"], "error: unknown BatchNorm mode 'none'"),
        (["--flops", "60K", "--set", "population=0"], "population"),
        (["--flops", "60K", "--set", "tolerance=-1"], "tolerance"),
        (["--flops", "60K", "--set", "populatoin=5"], "did you mean"),
    ],
)
def test_wrong_inputs_are_one_line(run_cli, run, arguments, message):
    before = sorted(run.rglob("*"))
    code, out, err = run_cli("search", run, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(run.rglob("*")) == before


def test_runs_without_a_supernet_are_refused(run_cli, run, tmp_path):
    code, _, err = run_cli("search", tmp_path / "nothing", "--flops", "60K")
    assert (code, err.count("\n")) == (2, 1)
    assert "not a run directory" in err
    shutil.rmtree(run / "supernet")
    code, _, err = run_cli("search", run, "--flops", "60K")
    assert (code, err.count("\n")) == (2, 1)
    assert "no supernet" in err


def test_a_search_of_an_older_version_is_resumed(run_cli, run):
    assert run_cli("search", run, "--flops", "60K", *SMALL)[0] == 0
    file = run / "searches" / "macs-60K" / "search.json"
    older = json.loads(file.read_text())
    del older["settings"]["bn_images"]
    file.write_text(json.dumps(older))
    assert run_cli("search", run, "--flops", "60K", *SMALL)[0] == 0
    code, _, err = run_cli("search", run, "--flops", "60K", "--set", "bn_images=7", *SMALL)
    assert code == 2
    assert "holds a search with another settings" in err


def test_another_search_under_the_same_name_is_refused(run_cli, run):
    assert run_cli("search", run, "--flops", "60K", "--name", "mine", *SMALL)[0] == 0
    code, _, err = run_cli("search", run, "--flops", "55K", "--name", "mine", *SMALL)
    assert code == 2
    assert "another budget" in err


def test_names_of_searches():
    assert default_name(Budget(max_macs=330_000_000), "evolution", (), True) == "macs-330M"
    assert (
        default_name(Budget(max_params=5_000_000, min_macs=10**8), "random", (), True) == "macs-100M-params-5M-random"
    )
    assert default_name(Budget(), "evolution", ("macs",), False) == "front-macs-no-pool"
    assert default_name(Budget(), "evolution", (), True) == "all"
    assert default_name(Budget(max_macs=10**6), "model", (), True) == "macs-1M-model"
    assert default_name(Budget(max_macs=10**6), "model", (), True, usual="model") == "macs-1M"
    assert default_name(Budget(max_macs=10**6), "evolution", (), True, usual="model") == "macs-1M-evolution"
