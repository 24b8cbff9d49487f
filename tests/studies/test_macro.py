import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.schedule import Schedule, corrected_images, epochs_within
from greedynas.greedy.searchers.additive import additive_model
from greedynas.greedy.validation import calibration_images
from greedynas.jobs.resolving import load_config
from greedynas.models.nwot import nwot_score
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream
from greedynas.spaces.paths import canonical
from greedynas.spaces.space import load_space
from greedynas.studies.macro.results import found_within, measures, paired, reference_rankings, summarised
from greedynas.studies.macro.run import (
    METHODS,
    MacroOptions,
    make_part,
    method_config,
    quick,
    ranked_paths,
    untrained_networks,
    untrained_part,
    with_epochs,
)
from greedynas.studies.study import Done
from greedynas.studies.supernets import load_trained, within_cost
from greedynas.studies.truth import Truth, read_truth

pytestmark = pytest.mark.usefixtures("one_thread")

# The macro space at 8 px on 240 images of clothes takes seconds instead of minutes.
SMALL = ["--data", "fashion", "--set", "image_size=8", "--set", "data.val_images=0.97", "--set", "batch_size=24",
         "--set", "filter_images=20", "--set", "bn_images=20", "--images", 20, "--epochs", 3, "--paths", 360,
         "--jobs", 1]  # fmt: skip


@pytest.fixture(scope="module")
def macro_truth(synthetic_truth):
    """Use a synthetic truth, because no test in this file depends on the real one."""
    return synthetic_truth


@pytest.fixture(scope="module")
def truth(macro_truth):
    return read_truth(macro_truth)


@pytest.fixture(scope="module")
def made_up():
    """Make a ground truth of the macro space without a file; the paths of a network have copies of its accuracies."""
    space = load_space("macro")
    paths = np.array(list(np.ndindex(*space.num_ops)))
    rng, known = stream(0, "made up"), {}
    trainings = np.array([known.setdefault(canonical(path, space), rng.normal(90, 2, 3)) for path in paths.tolist()])
    costs = space.costs(paths)
    return Truth(space, paths, trainings, costs.macs, costs.params)


@pytest.fixture(scope="module")
def studied(macro_truth, tmp_path_factory):
    """Run a small study of all methods on the command line."""
    from greedynas.cli import main as cli

    folder = tmp_path_factory.mktemp("macro") / "study"
    arguments = ["--quick", *SMALL, "--moments", 2, "--bn", "batch", "--bn", "running", "--greedy-share", 0.8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["greedynas", "study", "macro", "--truth", str(macro_truth), "--out", str(folder), *map(str, arguments)])  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0
    return folder, arguments


def test_the_quick_study_end_to_end(studied):
    folder, _ = studied
    results = json.loads((folder / "study.json").read_text())["results"]
    assert set(results["methods"]) == {"uniform", "fair", "greedy", "greedy 80%"}
    assert {(one["ours"], one["theirs"]) for one in results["differences"]} == {
        (ours, theirs) for ours in ("greedy", "greedy 80%") for theirs in ("uniform", "fair")
    }
    assert list(results["references"]) == ["FLOPs", "parameters", "non-ID ops", "NWOT", "additive (truth)", "perfect"]
    assert results["paths"] == 360
    assert 300 <= results["distinct"] < 360
    for row in results["parts"]:
        assert set(row["modes"]) == {"batch", "running"}
        assert {group: row[group] for group in ("distinct", "all")} == row["modes"]["batch"]
        assert -1 <= row["all"]["tau_b"] <= 1
        assert 1 <= row["found"]["unlimited"]["rank"] <= row["found"]["unlimited"]["of"] == results["distinct"]
        assert row["found"]["50M"]["macs"] <= 50_000_000
        assert len(row["moments"]) == 1
        assert 0 < row["moments"][0]["epoch"] < row["epochs"]
        assert set(row["moments"][0]) == {"step", "epoch", "distinct", "all"}
    page = (folder / "study.html").read_text()
    assert "By the accuracy on the supernet alone" in page
    assert "By the additive model alone" in page
    assert f"{results['distinct']:,} distinct networks (360 of 6,561 paths)" in page
    assert "the highest test accuracy of 50 epochs" in page
    assert "tuned against this ground truth" in page
    assert "the results are not meaningful" in page
    assert "The paper, Table 1" in page
    assert "Agreement with the ground truth" in page


def test_paths_are_ranked_by_the_score_of_a_search(studied, truth):
    folder, _ = studied
    few = truth.only(ranked_paths(6561, 360))
    for row in json.loads((folder / "study.json").read_text())["results"]["parts"]:
        name = {"greedy 80%": "greedy-0.8"}.get(row["method"], row["method"])
        accuracies = np.load(folder / "parts" / f"{name}-0.npz")["batch_accuracy"]
        scores = 0.5 * accuracies.astype(float) + 0.5 * additive_model(few.paths, accuracies)
        additive = additive_model(few.paths, accuracies)
        for found, by in ((row, scores), (row["by_accuracy"], accuracies), (row["by_additive"], additive)):
            one_each = stats.kendalltau(by[few.distinct], few.accuracies[few.distinct]).statistic
            assert found["distinct"]["tau_b"] == pytest.approx(one_each)
            assert found["all"]["tau_b"] == pytest.approx(stats.kendalltau(by, few.accuracies).statistic)


def test_untrained_networks_are_a_part_of_their_own(studied, truth):
    """Compare the stored scores with new ones on a batch of training images, and the reported τ with these scores."""
    folder, _ = studied
    saved, arrays = json.loads((folder / "parts" / "nwot-0.json").read_text()), np.load(folder / "parts" / "nwot-0.npz")
    space = load_config(folder / "parts" / "greedy-0" / "config.yaml").space
    networks = [tuple(path) for path in arrays["networks"].tolist()]
    assert len(set(networks)) == saved["settings"]["networks"] == 300  # --quick
    data = load_trained(folder / "parts" / "greedy-0", load_config(folder / "parts" / "greedy-0" / "config.yaml")).data
    images = calibration_images(data, 32, stream(0, "images of untrained networks"))
    assert len(images) == saved["result"]["images"] == 32
    assert nwot_score(networks[7], space, images, seed=0) == pytest.approx(arrays["scores"][7], rel=1e-6)
    results = json.loads((folder / "study.json").read_text())["results"]
    accuracies = [truth.accuracies[np.ravel_multi_index(path, [3] * 8)] for path in networks]
    expected = stats.kendalltau(arrays["scores"], accuracies).statistic
    assert results["references"]["NWOT"]["distinct"]["tau_b"] == pytest.approx(expected)
    assert [row["networks"] for row in results["untrained"]] == [300]


def test_the_methods_cost_the_same(studied):
    folder, _ = studied
    rows = {row["method"]: row for row in json.loads((folder / "study.json").read_text())["results"]["parts"]}
    assert (rows["uniform"]["epochs"], rows["fair"]["epochs"]) == (3, 1)
    allowed = 3 * 240
    share = rows.pop("greedy 80%")
    assert share["corrected_images"] <= 0.8 * allowed
    assert share["epochs"] < rows["greedy"]["epochs"]
    for row in rows.values():
        assert 0.6 * allowed < row["corrected_images"] <= allowed
    assert rows["greedy"]["evaluation_images"] > 0
    assert rows["fair"]["optimization_images"] == rows["uniform"]["optimization_images"]


def test_the_kept_supernets_give_the_same_rankings_again(studied):
    """Check that the stored accuracies are in the order of the paths and use the BatchNorm mode of the search."""
    folder, _ = studied
    saved = json.loads((folder / "parts" / "greedy-0.json").read_text())
    stored = np.load(folder / "parts" / "greedy-0.npz")["batch_accuracy"]
    config = load_config(folder / "parts" / "greedy-0" / "config.yaml")
    trained = load_trained(folder / "parts" / "greedy-0", config)
    every = list(np.ndindex(*config.space.num_ops))
    paths = [every[i] for i in ranked_paths(6561, 360)[:3]]
    images = trained.data.val.eval_batch(trained.data.val.balanced(20, stream(0, "ranked images")))
    found = evaluate_paths(trained.net, paths, *images, "batch", bn_images=500, precision=trained.accuracies.precision)
    assert found.accuracies == pytest.approx(stored[:3])
    assert len(stored) == saved["settings"]["paths"] == 360


def test_repeating_the_command_trains_nothing_and_other_settings_are_refused(studied, run_cli, macro_truth):
    folder, arguments = studied
    before = (folder / "parts" / "greedy-0.json").read_text()
    same = [argument if argument != "fashion" else "elsewhere/" for argument in arguments]  # the images are not needed
    code, out, _ = run_cli("study", "macro", "--truth", macro_truth, "--out", folder, *same)
    assert code == 0
    assert "5 of 5 parts are already finished" in out
    assert (folder / "parts" / "greedy-0.json").read_text() == before
    code, _, err = run_cli("study", "macro", "--truth", macro_truth, "--out", folder, *same, "--set", "greedy.lr=0.3")
    assert code == 2
    assert "part greedy-0 with other settings: config.train.lr is 0.1 there, 0.3 here" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paths", 20], "too few paths for a correlation: --paths 20 are 20 distinct networks"),
        (["--paths", 300], "take 360 paths or more"),
        (["--method", "gredy"], "unknown method 'gredy' (did you mean 'greedy'?)"),
        (["--bn", "none"], "unknown BatchNorm mode 'none'"),
        (["--greedy-share", 2], "--greedy-share is a share of the others' cost"),
        (["--greedy-share", 0.5, "--method", "fair"], "add --method greedy"),
        (["--set", "space=fashion"], "the ground truth is that of space macro, not of fashion"),
        (["--set", "greedy.speed=2"], "unknown setting 'speed'"),
        (["--data", "nowhere/", "--jobs", 1, "--seeds", 1], "nowhere"),
    ],
)
def test_wrong_input_gives_a_one_line_error(run_cli, tmp_path, macro_truth, arguments, message):
    code, _, err = run_cli("study", "macro", "--truth", macro_truth, "--out", tmp_path / "study", *arguments)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_missing_data_is_refused_before_any_work(run_cli, tmp_path, macro_truth):
    code, out, err = run_cli("study", "macro", "--truth", macro_truth, "--out", tmp_path / "study")
    assert (code, out) == (2, "")
    assert err.startswith("error: name the data with --data")
    assert not (tmp_path / "study").exists()


def test_an_invalid_truth_is_refused_before_any_work(run_cli, tmp_path):
    (tmp_path / "truth.json").write_text("{}")
    code, _, err = run_cli("study", "macro", *SMALL, "--truth", tmp_path / "truth.json", "--out", tmp_path / "study")
    assert code == 2
    assert "is not NAS-Bench-Macro's ground truth" in err
    assert not (tmp_path / "study").exists()


def test_settings_of_one_method_and_of_all():
    options = MacroOptions({"lr": 0.3, "greedy.lr": 0.2, "greedy.m": 8, "uniform.max_epochs": 20})
    greedy, uniform = method_config("greedy", options), method_config("uniform", options)
    assert (greedy.train.lr, greedy.train.m, greedy.train.sampler) == (0.2, 8, "greedy")
    assert (uniform.train.lr, uniform.train.m, uniform.train.sampler) == (0.3, 10, "uniform")
    assert make_part("uniform", 3, uniform, options).settings["own_epochs"] == 20
    part = make_part("greedy", 3, greedy, MacroOptions({"greedy.max_epochs": 40}, epochs=50), share=0.61)
    assert part.name == "greedy-0.61-3"
    assert part.settings["own_epochs"] is None  # the number was given for the whole cost
    assert part.settings["cost_epochs"] == pytest.approx(30.5)
    assert part.settings["config"]["seed"] == 3


def test_each_method_starts_from_its_preset():
    preset = load_config("cifar10-tuned")
    assert preset.rivals == {"uniform": "cifar10-uniform", "fair": "cifar10-fair"}
    own = {"batch_size": 512, "lr_warmup": 0.1, "zero_residuals": False}
    own = {"greedy": {}, "uniform": {**own, "lr": 0.1}, "fair": {**own, "lr": 0.05}}
    for method in METHODS:
        found, source = method_config(method, MacroOptions({})), load_config(preset.rivals.get(method, "cifar10-tuned"))
        different = {} if method == "greedy" else {"split_after_identity": True}
        assert found.experimental == source.experimental == {"snapshots": 3, "additive": 0.5, **different}
        assert found.train == source.train
        expected = {**preset.train.model_dump(), **own[method], "sampler": method, "max_epochs": found.train.max_epochs}
        assert found.train.model_dump() == expected
    rates = [method_config(method, MacroOptions({"lr": 0.07})).train.lr for method in METHODS]
    assert rates == [0.07] * 3  # explicit settings override the presets


@pytest.mark.parametrize("changes", [{}, {"fair.max_epochs": 40}])
def test_fair_trains_no_longer_than_is_best_for_it_by_default(changes):
    options = MacroOptions(changes, epochs=150)
    config = method_config("fair", options)
    epochs = changes.get("fair.max_epochs", load_config("cifar10-fair").study_epochs)
    assert with_epochs(config, 45_000, make_part("fair", 0, config, options).settings).train.max_epochs == epochs
    cheap = make_part("fair", 0, config, MacroOptions({}, epochs=21)).settings
    assert with_epochs(config, 45_000, cheap).train.max_epochs == 7  # of three paths each


def test_a_part_does_not_depend_on_the_presets_of_other_methods():
    options = MacroOptions({}, epochs=50)
    config = method_config("greedy", options)
    assert config.rivals
    other = config.model_copy(update={"rivals": {"uniform": "other.yaml"}})
    assert make_part("greedy", 0, config, options).settings == make_part("greedy", 0, other, options).settings


def test_a_rival_is_trained_on_the_same_images(tmp_path):
    """Check that only the training settings are taken from the preset that is named for a sampler."""
    file = tmp_path / "mine.yaml"
    text = "space: macro\nseed: 5\ndata: {source: somewhere/, val_images: 77}\nrivals: {uniform: cifar10-uniform}\n"
    file.write_text(text + "train: {log_every: 3}\nretrain: {epochs: 9}\n")
    found = method_config("uniform", MacroOptions({"lr": 0.7, "m": 12}, preset=str(file)))
    assert (found.data.source, found.data.val_images, found.seed, found.retrain.epochs) == ("somewhere/", 77, 5, 9)
    assert (found.train.sampler, found.train.batch_size, found.train.lr, found.train.m) == ("uniform", 512, 0.7, 12)
    assert found.train.log_every == 3
    assert found.experimental == load_config("cifar10-uniform").experimental
    fair = method_config("fair", MacroOptions({}, preset=str(file)))  # no preset is named for it
    assert fair.train == load_config(file, {"sampler": "fair"}).train


def test_a_method_may_not_train_longer_than_the_others(run_cli, tmp_path, macro_truth):
    code, _, err = run_cli(
        "study", "macro", "--truth", macro_truth, *SMALL, "--method", "uniform", "--seeds", 1,
        "--set", "uniform.max_epochs=9", "--out", tmp_path / "study",
    )  # fmt: skip
    assert code == 2
    assert "uniform.max_epochs=9 costs more than --epochs 3 allows: at most 3" in err


@pytest.mark.parametrize("sampler", ["uniform", "fair", "greedy"])
@pytest.mark.parametrize("bn", ["batch", "recalibrate"])
def test_epochs_within_a_cost(sampler, bn):
    """Check that one more epoch would exceed the cost."""
    settings = load_config("cifar10", {"sampler": sampler, "train.bn": bn, "filter_images": 300}).train
    allowed = 60 * 45_000
    epochs = epochs_within(settings, 45_000, allowed, load_space("macro"))

    def cost(count):
        return corrected_images(*Schedule(settings.model_copy(update={"max_epochs": count}), 45_000).predicted_images(space=load_space("macro")))  # fmt: skip

    assert cost(epochs) <= allowed < cost(epochs + 1)
    assert epochs_within(settings, 45_000, 10, load_space("macro")) == 0
    assert epochs == {"uniform": 60, "fair": 20}.get(sampler, epochs)


def test_a_study_of_another_machine_can_be_read_without_the_images(studied, run_cli, tmp_path, macro_truth):
    """Remove the untrained networks of a study: the error says how to continue without them."""
    folder, arguments = studied
    shutil.copytree(folder, tmp_path / "study", ignore=shutil.ignore_patterns("nwot*", "study.*"))
    same = ["study", "macro", "--truth", macro_truth, "--out", tmp_path / "study", *arguments]
    same[same.index("fashion")] = "elsewhere/"
    code, _, err = run_cli(*same)
    assert code == 2
    assert "no such data: 'elsewhere/'" in err
    assert "--no-untrained" in err
    assert run_cli(*same, "--no-untrained")[0] == 0
    results = json.loads((tmp_path / "study" / "study.json").read_text())["results"]
    assert "NWOT" not in results["references"]
    assert len(results["parts"]) == 4


def test_untrained_networks_depend_on_the_data_alone():
    few = MacroOptions({"lr": 0.3, "greedy.m": 8}, untrained_networks=50)
    assert untrained_part(1, few) == untrained_part(1, replace(few, changes={}))
    other = untrained_part(1, replace(few, changes={"data.val_images": 0.5}))
    assert other.settings["config"]["data"] != untrained_part(1, few).settings["config"]["data"]
    config = load_config("cifar10")
    networks = untrained_networks(config, {"paths": None, "networks": None})
    assert len(set(networks)) == 3969
    assert all(canonical(path, config.space) == path for path in networks)
    assert set(untrained_networks(config, untrained_part(1, few).settings)) < set(networks)


def test_quick_is_small():
    found = quick(MacroOptions({}, seeds=(7, 8)))
    assert (found.seeds, found.epochs, found.paths, found.images) == ((7,), 6.0, 1000, 150)
    assert found.untrained_networks == 300
    assert method_config("greedy", found).data.val_images == 0.96
    assert {method_config(method, found).train.batch_size for method in METHODS} == {64}
    assert method_config("fair", found).train.lr < method_config("uniform", found).train.lr
    assert (
        method_config("fair", replace(found, changes={"lr": 0.2})).train.lr == 0.2
    )  # explicit settings override --quick


def test_measures_of_the_truth_itself(truth):
    found = measures(truth, truth.accuracies)
    assert found["all"] == {
        "tau_a": pytest.approx(1, abs=1e-3),
        "tau_b": pytest.approx(1),
        "spearman": pytest.approx(1),
    }
    assert found["precision"] == {"distinct": 1, "all": 1}
    assert found["found"]["unlimited"]["rank"] == 1
    assert found["found"]["unlimited"]["path"] == "".join(map(str, truth.paths[truth.accuracies.argmax()]))
    assert found["found"]["60M"]["macs"] <= 60_000_000
    assert found["found"]["60M"]["behind_best"] == 0


def test_a_network_is_ranked_by_its_canonical_path(made_up):
    """Check that the values of a network's other paths only count in the measures over all paths."""
    order = np.arange(6561)
    scores = np.where(made_up.network == order, made_up.accuracies, 200 - made_up.accuracies)
    found = measures(made_up, scores)
    assert len(made_up.distinct) == 3969
    for scope in ("distinct", "distinct top 10%", "distinct top 1,000"):
        assert found[scope]["tau_b"] == pytest.approx(1)
    for scope in ("all", "all top 10%", "all top 1,000"):
        assert found[scope]["tau_b"] < 0.5
    assert found["precision"]["distinct"] == 1 > found["precision"]["all"]
    best = np.argsort(-made_up.accuracies, kind="stable")[:656]
    alone = stats.kendalltau(scores[best], made_up.accuracies[best]).statistic
    assert found["all top 10%"]["tau_b"] == pytest.approx(alone)  # over all paths, including copies


def test_the_true_rank_of_a_found_network_counts_networks(made_up):
    """Give the best network many paths: they share one rank."""
    copies = np.bincount(made_up.network, minlength=6561)
    true = np.where(made_up.network == copies.argmax(), 99.0, made_up.accuracies)
    truth = replace(made_up, trainings=np.repeat(true[:, None], 3, 1))
    second = np.setdiff1d(truth.distinct, copies.argmax())[true[np.setdiff1d(truth.distinct, copies.argmax())].argmax()]
    found = found_within(truth, np.where(np.arange(6561) == second, 1.0, 0.0), None, None)
    assert copies.max() > 2
    assert (found["rank"], found["of"]) == (2, 3969)


def test_only_some_untrained_networks_have_a_score(made_up):
    made_up = made_up.only(np.arange(0, 6561, 4))  # faster
    networks = made_up.paths[made_up.distinct[::3]]
    networks = np.array([canonical(path, made_up.space) for path in networks.tolist()])
    scores = made_up.accuracies[made_up.distinct[::3]]

    def part(scores):
        return Done("nwot-0", {}, {}, {"networks": networks, "scores": scores}, 1.0, "", {})

    found = reference_rankings(made_up, [part(scores), part(-scores)])["NWOT"]
    assert found["found"]["unlimited"]["of"] == len(networks)
    assert found["distinct"]["tau_b"] == pytest.approx(0, abs=1e-9)  # the mean over seeds
    one = reference_rankings(made_up, [part(scores)])["NWOT"]
    assert (one["distinct"]["tau_b"], one["all"]["tau_b"]) == (pytest.approx(1), pytest.approx(1))
    assert "NWOT" not in reference_rankings(made_up)


def test_the_lower_loss_decides_between_equal_scores(truth):
    scores, losses = np.zeros(6561), np.ones(6561)
    losses[100] = 0.5
    assert found_within(truth, scores, losses, None)["accuracy"] == pytest.approx(truth.accuracies[100])
    anyone = found_within(truth, scores, None, None)
    assert anyone["accuracy"] == pytest.approx(truth.accuracies.mean())


def test_differences_are_paired_by_seed():
    ours = [{"seed": seed, "all": {"tau_b": 0.8 + 0.01 * seed}} for seed in range(4)]
    rivals = [{"seed": seed, "all": {"tau_b": 0.7 + 0.01 * seed}} for seed in (3, 1, 2)]
    found = paired(ours, rivals)["all.tau_b"]
    assert (found["mean"], found["n"]) == (pytest.approx(0.1), 3)
    assert found["high"] - found["low"] == pytest.approx(0, abs=1e-9)  # the effect of the seed cancels
    assert summarised(ours)["all.tau_b"]["mean"] == pytest.approx(0.815)


def test_a_cost_below_one_epoch_is_refused():
    with pytest.raises(GreedyNASError, match=r"one epoch of greedy training costs more than 0\.5 epochs"):
        within_cost(load_config("cifar10"), 45_000, 0.5)


def test_the_study_imports_neither_pymoo_nor_plotly():
    code = (
        "import sys, greedynas.studies.macro, greedynas.studies.ranking; print({'pymoo', 'plotly'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
