"""Contests between supernets on a tiny space with a few images: the numbers are not meaningful but must be
consistent."""

import json

import numpy as np
import pytest
import yaml
from rich.console import Console

from greedynas.greedy.schedule import Schedule, corrected_images, supplement_corrected_images
from greedynas.greedy.settings import TrainSettings
from greedynas.jobs.resolving import load_config
from greedynas.runtime.rng import stream
from greedynas.spaces.budget import Budget
from greedynas.spaces.paths import canonical, parse_path
from greedynas.spaces.space import load_space
from greedynas.studies import contests
from greedynas.studies.contests import with_cost
from greedynas.studies.methods import run as study_methods
from greedynas.studies.methods.run import METHODS, MethodsOptions, every_nth
from greedynas.studies.study import read_part
from greedynas.studies.truth import read_truth
from greedynas.studies.verdicts import NO_DIFFERENCE, differences, judged, summaries
from tests.helpers.latency import made_up
from tests.helpers.methods import SMALL, write_config
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 60_000


def run_study(out, photos, file, console=None, **more):
    options = {"seeds": (0, 1), "retrain_seeds": 2, "jobs": 1, "budget": Budget(max_macs=LIMIT), **more}
    changes = {"data.source": str(photos), **options.pop("changes", {})}
    return study_methods.study_methods(
        out, MethodsOptions(str(file), changes, **options), console or Console(quiet=True)
    )


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """Run a small study; return its folder, the config file and the results."""
    home = tmp_path_factory.mktemp("methods")
    file = write_config(home / "tiny.yaml")
    made_up(tiny_space()).save(home / "latency.json")
    return home / "study", file, run_study(home / "study", photos, file, latency_table=home / "latency.json")


def test_every_method_and_searcher_has_its_row(finished):
    folder, _, study = finished
    found = study["results"]["contestants"]
    expected = ["random network", *(f"{method}, {one}" for method in METHODS[1:] for one in ("random", "evolution"))]
    assert list(found) == expected
    rows = study["results"]["rows"]
    assert len(rows) == 2 * len(expected)
    space = tiny_space()
    for row in rows:
        path = parse_path(row["ops"], space)
        assert row["macs"] == space.costs([path]).macs[0] <= LIMIT
        assert row["latency_ms"] == pytest.approx(made_up(space).price(path, space))
        assert row["network"] == "".join(map(str, canonical(path, space)))
        assert len(row["retrainings"]) == 2
        assert row["top1"] == pytest.approx(np.mean(row["retrainings"]))
        assert ("supernet_accuracy" in row) == (row["method"] != "random")
    assert json.loads((folder / "study.json").read_text())["results"] == study["results"]


def test_equal_cost_is_equal_and_the_rivals_have_the_papers_cost(finished):
    _, _, study = finished
    rows = {(row["method"], row["seed"]): row for row in study["results"]["rows"] if row["searcher"] == "evolution"}
    epoch = 40  # images: four steps of ten
    for seed in (0, 1):
        greedy, uniform, fair = (rows[method, seed] for method in ("greedy", "uniform", "fair"))
        assert greedy["evaluation_images"] > 0
        assert uniform["evaluation_images"] == fair["evaluation_images"] == 0
        # The corrected cost is rounded to whole epochs.
        assert abs(rows["uniform-E", seed]["corrected_images"] - greedy["corrected_images"]) <= epoch / 2
        assert uniform["corrected_images"] > greedy["corrected_images"]
        assert fair["optimization_images"] == 3 * epoch * fair["epochs"]  # as many paths a step as a layer has ops


def test_a_network_is_retrained_once_for_all_methods_that_found_it(finished):
    folder, _, study = finished
    wanted = {(row["network"], row["seed"]) for row in study["results"]["rows"]}
    parts = sorted(file.stem for file in (folder / "parts").glob("net-*.json"))
    assert parts == sorted(f"net-{network}-{seed}-{i}" for network, seed in wanted for i in range(2))
    seeds = [json.loads((folder / "parts" / f"{part}.json").read_text())["settings"]["retrain_seed"] for part in parts]
    assert set(seeds) == {0, 1, 1000, 1001}  # the same network found with another seed is another observation
    for row in study["results"]["rows"]:
        files = [folder / "parts" / f"net-{row['network']}-{row['seed']}-{i}.json" for i in range(2)]
        measured = [json.loads(file.read_text())["result"]["test_top1"] for file in files]
        assert row["retrainings"] == pytest.approx([100 * top1 for top1 in measured])


def test_differences_are_paired_by_seed(finished):
    _, _, study = finished
    top1 = {(row["contestant"], row["seed"]): row["top1"] for row in study["results"]["rows"]}
    pairs = {(one["ours"], one["theirs"]) for one in study["results"]["differences"]}
    assert {("greedy, evolution", "uniform-E, evolution"), ("greedy, random", "fair, random")} <= pairs
    assert {("greedy, evolution", "random network"), ("uniform, evolution", "uniform, random")} <= pairs
    for one in study["results"]["differences"]:
        each = [top1[one["ours"], seed] - top1[one["theirs"], seed] for seed in (0, 1)]
        assert one["n"] == 2
        assert one["mean"] == pytest.approx(np.mean(each))


def test_the_page_shows_the_papers_tables_beside_ours(finished):
    folder, _, study = finished
    page = (folder / "study.html").read_text()
    assert study["title"] in page
    for shown in (
        "The paper (ImageNet)",
        "74.85",
        "GreedyNAS ≤ 80 ms",
        "greedy, evolution − uniform-E, evolution",
        "verdict",
    ):
        assert shown in page
    drawn = study["results"]["contestants"]["random network"]["top1"]["mean"]
    assert f"Not drawn: the random network, mean {drawn:.2f}." in page
    assert "replaces retraining" not in page
    assert "src=" not in page.partition("<script>")[0]  # the page loads nothing


def test_repeating_the_command_computes_only_missing_parts(finished, photos, monkeypatch):
    folder, file, study = finished

    def fail(*_, **__):
        raise AssertionError("a finished part was computed again")

    with monkeypatch.context() as patch:
        patch.setattr(contests, "train_stage", fail)
        patch.setattr("greedynas.stages.retrain.train_and_test", fail)
        table = folder.parent / "latency.json"
        # The parts may come from another machine, so the images are not needed.
        assert run_study(folder, "elsewhere", file, latency_table=table)["results"] == study["results"]
    (folder / "parts" / "uniform-E-1.json").unlink()  # its run directory remains
    network = next(row["network"] for row in study["results"]["rows"] if row["seed"] == 0)
    (folder / "parts" / f"net-{network}-0-1.json").unlink()
    again = run_study(folder, photos, file, latency_table=table)["results"]
    clock = ("seconds", "machine")
    assert [{k: v for k, v in row.items() if k not in clock} for row in again["rows"]] == [
        {k: v for k, v in row.items() if k not in clock} for row in study["results"]["rows"]
    ]


def test_more_seeds_and_trainings_may_be_added_but_nothing_else(finished, photos, run_cli):
    folder, file, study = finished
    command = ["study", "methods", file, "--data", photos, "--flops", "60K", "--out", folder, "--json"]
    command += ["--latency-table", folder.parent / "latency.json"]
    code, out, err = run_cli(
        *command, "--seeds", 2, "--retrain-seeds", 1
    )  # fewer trainings: the first one of each network
    assert (code, "parts are already finished" in err) == (0, True)
    first = json.loads(out)["results"]["rows"]
    assert [row["retrainings"] for row in first] == [row["retrainings"][:1] for row in study["results"]["rows"]]
    code, out, err = run_cli(*command, "--set", "greedy.lr=0.01")
    assert code == 2
    assert "other settings: config.train.lr is 0.05 there, 0.01 here" in err
    assert len(err.splitlines()) == 1


def test_ground_truth_and_a_systematic_sample(photos, tmp_path, synthetic_truth, capsys):
    file = tmp_path / "macro.yaml"
    train = {**SETTINGS, "max_epochs": 1, "warmup": 2}
    search = {"population": 15, "generations": 2}
    file.write_text(yaml.safe_dump({**SMALL, "space": "macro", "train": train, "search": search}))
    limit = 60_000_000
    study = run_study(
        tmp_path / "study",
        photos,
        file,
        Console(width=200),
        retrain_seeds=1,
        truth=synthetic_truth,
        methods=("random", "uniform", "greedy"),
        searchers=("evolution",),
        systematic=30,
        budget=Budget(max_macs=limit),
        keep=False,
    )
    truth = read_truth(synthetic_truth)
    place = {"".join(map(str, path)): i for i, path in enumerate(truth.paths.tolist())}
    feasible = truth.distinct[truth.macs[truth.distinct] <= limit]  # copies of a network share one rank
    rows = study["results"]["rows"]
    for row in rows:
        true = truth.accuracies[place[row["network"]]]
        assert row["top1"] == pytest.approx(true)
        assert (row["rank"], row["of"]) == ((truth.accuracies[feasible] > true).sum() + 1, len(feasible))
    reference = study["results"]["reference"]
    assert reference["best"] == pytest.approx(truth.accuracies[feasible].max())
    assert reference["mean"] == pytest.approx(truth.accuracies[feasible].mean())
    assert (reference["feasible"], reference["feasible_paths"]) == (len(feasible), (truth.macs <= limit).sum())
    assert not list((tmp_path / "study" / "parts").glob("net-*"))  # nothing was retrained
    sampled = study["results"]["systematic"]
    assert [(one["method"], one["seed"]) for one in sampled["supernets"]] == [
        (method, seed) for method in ("uniform", "greedy") for seed in (0, 1)
    ]
    space = load_space("macro")
    for one in sampled["supernets"]:
        assert len(one["paths"]) == 30
        assert one["searched"] == 30
        assert one["supernet_accuracy"] == sorted(one["supernet_accuracy"], reverse=True)
        networks = ["".join(map(str, canonical(parse_path(path, space), space))) for path in one["paths"]]
        assert one["top1"] == pytest.approx([truth.accuracies[place[network]] for network in networks])
        assert one["tau_b"] is None or -1 <= one["tau_b"] <= 1
    assert {(one["ours"], one["theirs"]) for one in sampled["differences"]} == {("greedy", "uniform")}
    printed = " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "study" / "study.html").read_text()
    for text in ("ground truth", "replaces retraining", "Systematic sample"):
        assert text in printed
        assert text in page
    assert not (tmp_path / "study" / "parts" / "greedy-0").exists()  # --no-keep


def test_systematic_samples_that_are_retrained_come_from_one_seed(finished):
    folder, file, _ = finished
    options = MethodsOptions(
        str(file), {}, Budget(), methods=("random", "uniform", "greedy"), seeds=(0, 1), systematic=9
    )
    done = {name: read_part(folder, name) for name in ("uniform-0", "greedy-0")}
    sampled = study_methods.systematic(done, options, load_config(file))
    assert list(sampled) == [("uniform", 0), ("greedy", 0)]
    assert all(len(set(one["paths"])) == 9 for one in sampled.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "unifrom"], "unknown method 'unifrom'"),
        (["--searcher", "annealing"], "unknown searcher 'annealing'"),
        (["--method", "uniform-E"], "uniform-E trains at greedy's cost: add --method greedy"),
        (["--systematic", "10"], "a rank correlation of 10 paths is not meaningful; take at least 30"),
        (["--systematic", "30"], "--systematic 30 is more than the 18 searched paths"),
        (["--truth", "nosuch.json"], "the ground truth is that of space macro, not of tiny"),
        (["--truth", "nosuch.json", "--retrain-seeds", "3"], "with --truth nothing is retrained"),
        (["--flops", "60K", "--flops", "70K"], "a study has a single budget"),
        (["--flops", "10"], "no path has macs of at most 10"),
        (["--latency", "5ms"], "a latency limit needs a latency table"),
        (["--set", "fair.lr=0.1", "--method", "greedy"], "this study has no supernet fair"),
        (["--set", "greedy.lrr=0.1"], "unknown setting 'lrr'"),
        (["--set", "retrain.inherit=true"], "a study trains the found networks from scratch"),
        (["--epochs", "0.5"], "--epochs must be at least 1"),
        (["--seeds", "0"], "invalid value for '--seeds'"),
    ],
)
def test_wrong_input_gives_a_one_line_error(run_cli, photos, tmp_path, options, message):
    file = write_config(tmp_path / "tiny.yaml")
    code, out, err = run_cli("study", "methods", file, "--data", photos, "--out", tmp_path / "study", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "study").exists()


def test_no_data_auto_uneven_layers_and_no_pymoo_are_refused(run_cli, photos, tmp_path, monkeypatch):
    out = tmp_path / "study"
    assert "name the data with --data" in run_cli("study", "methods", "cifar10", "--out", out)[2]
    assert "auto chooses other settings" in run_cli("study", "methods", "auto", "--data", photos, "--out", out)[2]
    space = tiny_space().model_dump(mode="json")
    space["stages"][0]["ops"] = ["ID", "MB2_K3"]
    file = write_config(tmp_path / "uneven.yaml", space=space)
    assert (
        "the fair sampler needs the same number of ops"
        in run_cli("study", "methods", file, "--data", photos, "--out", out)[2]
    )
    monkeypatch.setattr(contests, "find_spec", lambda name: None)
    code, _, err = run_cli("study", "methods", file, "--data", photos, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "need pymoo" in err
    assert not out.exists()


# Costs and verdicts


def test_equal_cost_is_that_of_the_paper():
    """Check that 46 greedy epochs cost as much as 73 uniform ones (Table 1)."""
    config = load_config("imagenet", {"train.sampler": "uniform"})
    images = 1_230_000
    assert with_cost(config, images, {"images": supplement_corrected_images()}).train.max_epochs == 73
    assert with_cost(config, images, {"epochs": 120}).train.max_epochs == 120
    greedy = load_config("imagenet", {"train.warmup": 0}).train.model_dump(mode="json")
    for method, epochs in (("uniform", 120), ("fair", 150)):
        cost = {"train": greedy, "times": study_methods.FULL[method]}
        assert with_cost(config, images, cost).train.max_epochs == pytest.approx(epochs, abs=1)


def test_a_rival_trains_no_longer_than_its_preset_says():
    def epochs(method, **more):
        options = study_methods.MethodsOptions(
            preset="cifar10-tuned", budget=Budget(), seeds=(0,), methods=("uniform", "fair", "greedy"), **more
        )
        configs = {name: study_methods.method_config(name, options) for name in options.methods}
        parts = {part.name: part.settings for part in study_methods._supernets(configs, options)}
        return with_cost(configs[method], 45_000, parts[f"{method}-0"]["cost"]).train.max_epochs

    best = load_config("cifar10-fair").study_epochs
    assert epochs("fair", changes={"max_epochs": 90}) == best  # greedy's 90 would allow more
    assert epochs("uniform", changes={}) > 60
    assert epochs("fair", changes={}, epochs=90) == 30  # of three paths each, as requested
    assert epochs("fair", changes={"fair.max_epochs": 30}) == 30
    assert epochs("fair", changes={"max_epochs": 5}) < best  # greedy's cost is smaller


def test_a_verdict_needs_an_interval_that_supports_it():
    assert judged([0.30, 0.31, 0.29, 0.30, 0.32], 1)["verdict"] == "better"
    assert judged([-0.30, -0.31, -0.29, -0.30, -0.32], 8)["verdict"] == "worse"
    assert judged([0.5, -0.3, 0.4, 0.1, -0.2], 1)["verdict"] == NO_DIFFERENCE
    assert judged([3.0], 1)["verdict"] == "a single pair: no verdict is possible"
    assert judged([0.0, 0.0, 0.0], 1)["verdict"] == "always the same"
    assert judged([0.2, 0.2], 1)["verdict"] == "every pair differs by the same amount: no spread to judge by"
    slight = [0.05, 0.25, 0.12, 0.31, 0.15]  # an interval just above zero
    assert judged(slight, 1)["verdict"] == "better"
    assert judged(slight, 20)["verdict"] == "better at 95%, but not with all 20 comparisons counted"


def test_differences_of_independent_seeds_are_rarely_called_better():
    """Compare equal methods: one interval in twenty excludes zero, far fewer after correction for all comparisons."""
    rng = np.random.default_rng(0)
    rows = [
        {"contestant": name, "seed": seed, "top1": float(rng.normal()), "retrainings": [0.0]}
        for name in map(str, range(400))
        for seed in range(5)
    ]
    pairs = [(str(i), str(i + 1)) for i in range(0, 400, 2)]
    verdicts = [one["verdict"] for one in differences(rows, pairs)]
    assert 0.75 <= verdicts.count(NO_DIFFERENCE) / len(verdicts) < 1
    assert sum(verdict in ("better", "worse") for verdict in verdicts) <= 2


def test_the_spread_of_one_supernet_is_that_of_retraining():
    row = {"contestant": "greedy", "seed": 0, "top1": 90.0, "retrainings": [89.0, 91.0]}
    assert summaries([row])["greedy"]["top1"]["of"] == "retrainings"
    assert summaries([row])["greedy"]["top1"]["n"] == 2
    several = summaries([row, {**row, "seed": 1, "top1": 92.0}])["greedy"]["top1"]
    assert (several["of"], several["n"], several["mean"]) == ("seeds", 2, 91.0)


def test_a_systematic_sample_covers_the_ranking_evenly():
    accuracies = stream(0, "accuracies").random(1000)
    chosen = every_nth(accuracies, 30, stream(0, "start"))
    ranks = np.argsort(np.argsort(-accuracies))[chosen]
    assert len(set(ranks)) == 30
    assert (np.diff(ranks) >= 33).all()
    assert (np.diff(ranks) <= 34).all()
    assert ranks[0] < 34
    assert sorted(every_nth(accuracies[:30], 30, stream(0, "all"))) == list(range(30))


# Methods with architecture parameters


@pytest.fixture(scope="module")
def learned(photos, tmp_path_factory):
    """Run a small study of methods that learn probabilities, and of uniform sampling."""
    home = tmp_path_factory.mktemp("learned")
    space = tiny_space(["ID", "MB2_K3", "MB4_K5"])
    train = {**SETTINGS, "warmup": 2, "pool_size": 4}
    file = write_config(home / "tiny.yaml", space=space.model_dump(mode="json"), train=train)
    methods = ("random", "uniform", "greedy", "darts", "proxyless", "single-path")
    options = {"methods": methods, "searchers": ("random",), "retrain_seeds": 1, "seeds": (0,)}
    return home / "study", run_study(home / "study", photos, file, budget=Budget(max_macs=30_000), **options)


def test_methods_that_learn_are_derived_within_the_limits(learned):
    folder, study = learned
    found = study["results"]["contestants"]
    derived = [f"{method}, derivation" for method in ("darts", "proxyless", "single-path")]
    assert list(found) == ["random network", "uniform, random", "greedy, random", *derived]
    assert all(row["macs"] <= 30_000 for row in study["results"]["rows"])
    pairs = {(one["ours"], one["theirs"]) for one in study["results"]["differences"]}
    assert {(one, "random network") for one in derived} | {("greedy, random", one) for one in derived} <= pairs
    settings = json.loads((folder / "parts" / "darts-0.json").read_text())["settings"]
    assert settings["config"]["train"]["target"]["max_macs"] == 30_000
    # No method costs more than greedy's full length, but for one epoch at least.
    rows = {row["contestant"]: row for row in study["results"]["rows"]}
    limit = Schedule(TrainSettings(**{**SETTINGS, "warmup": 2, "pool_size": 4}), 42).predicted_images()
    most = corrected_images(*limit)
    for one in derived:
        assert rows[one]["corrected_images"] <= most or rows[one]["epochs"] == 1
    assert rows["single-path, derivation"]["epochs"] > 1


def test_memory_and_time_of_updates_are_measured(learned):
    folder, study = learned
    steps = study["results"]["steps"]
    assert list(steps) == ["uniform", "greedy", "darts", "proxyless", "single-path"]
    memory = {name: step["step_memory"] / steps["uniform"]["step_memory"] for name, step in steps.items()}
    assert memory["greedy"] == pytest.approx(1, abs=0.5)
    assert memory["uniform"] < memory["proxyless"] < memory["darts"]
    assert memory["darts"] > 1.5
    assert all(step["step_seconds"] > 0 for step in steps.values())
    assert steps["single-path"]["weights"] < steps["uniform"]["weights"]  # the ops of a layer share them
    page = (folder / "study.html").read_text()
    assert "Memory and time of an update (Table 2)" in page
    assert "darts, derivation − random network" in page


def test_methods_are_named_one_by_one_or_with_commas(run_cli, tmp_path):
    """An unknown one is refused with the list of the known ones."""
    for chosen in (["--methods", "greedy,dart"], ["--method", "greedy", "--method", "dart"]):
        code, _, err = run_cli("study", "methods", "fashion", "--out", tmp_path / "study", *chosen)
        assert code == 2
        assert "unknown method 'dart'" in err
        assert "darts" in err
