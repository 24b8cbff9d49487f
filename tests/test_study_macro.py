import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from greedynas.additive import additive_model
from greedynas.config import load_config
from greedynas.errors import GreedyNASError
from greedynas.evaluation import evaluate_paths
from greedynas.schedule import Schedule, corrected_images, epochs_within
from greedynas.streams import stream
from greedynas.studies.macro import METHODS, MacroOptions, make_part, method_config, quick, ranked_paths, with_epochs
from greedynas.studies.macro_results import found_within, measures, paired, summarised
from greedynas.studies.supernets import load_trained, within_cost
from greedynas.studies.truth import read_truth

pytestmark = pytest.mark.usefixtures("one_thread")

# The macro space at 8 px on 240 pictures of clothes: seconds instead of minutes.
SMALL = ["--data", "fashion", "--set", "image_size=8", "--set", "data.val_images=0.97", "--set", "batch_size=24",
         "--set", "filter_images=20", "--set", "bn_images=20", "--images", 20, "--epochs", 3, "--paths", 300,
         "--jobs", 1]  # fmt: skip


@pytest.fixture(scope="module")
def macro_truth(synthetic_truth):
    """No test here depends on what is true, so a made-up truth serves."""
    return synthetic_truth


@pytest.fixture(scope="module")
def truth(macro_truth):
    return read_truth(macro_truth)


@pytest.fixture(scope="module")
def studied(macro_truth, tmp_path_factory):
    """One small study of all methods, by the command line."""
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
    assert set(results["references"]) == {"FLOPs", "parameters", "non-ID ops", "additive", "perfect"}
    assert results["networks"] == 300
    for row in results["parts"]:
        assert set(row["modes"]) == {"batch", "running"}
        assert row["all"] == row["modes"]["batch"]
        assert -1 <= row["all"]["tau_b"] <= 1
        assert 1 <= row["found"]["unlimited"]["rank"] <= 300
        assert row["found"]["50M"]["macs"] <= 50_000_000
        assert len(row["moments"]) == 1
        assert 0 < row["moments"][0]["epoch"] < row["epochs"]
    page = (folder / "study.html").read_text()
    assert "By the accuracy on the supernet alone" in page
    assert "nothing to quote" in page
    assert "The paper, Table 1" in page
    assert "Agreement with the ground truth" in page


def test_paths_are_ranked_by_the_score_that_a_search_would_choose_by(studied, truth):
    folder, _ = studied
    few = truth.only(ranked_paths(6561, 300))
    for row in json.loads((folder / "study.json").read_text())["results"]["parts"]:
        name = {"greedy 80%": "greedy-0.8"}.get(row["method"], row["method"])
        accuracies = np.load(folder / "parts" / f"{name}-0.npz")["batch_accuracy"]
        scores = 0.5 * accuracies.astype(float) + 0.5 * additive_model(few.paths, accuracies)
        assert row["all"]["tau_b"] == pytest.approx(stats.kendalltau(scores, few.accuracies).statistic)
        alone = stats.kendalltau(accuracies, few.accuracies).statistic
        assert row["by_accuracy"]["all"]["tau_b"] == pytest.approx(alone)


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


def test_the_rankings_can_be_had_again_from_the_kept_supernets(studied):
    """The stored accuracies are those of the paths in their order, with the search's BatchNorm."""
    folder, _ = studied
    saved = json.loads((folder / "parts" / "greedy-0.json").read_text())
    stored = np.load(folder / "parts" / "greedy-0.npz")["batch_accuracy"]
    config = load_config(folder / "parts" / "greedy-0" / "config.yaml")
    trained = load_trained(folder / "parts" / "greedy-0", config)
    every = list(np.ndindex(*config.space.num_ops))
    paths = [every[i] for i in ranked_paths(6561, 300)[:3]]
    images = trained.data.val.eval_batch(trained.data.val.balanced(20, stream(0, "ranked images")))
    found = evaluate_paths(trained.net, paths, *images, "batch", bn_images=500, precision=trained.precision)
    assert found.accuracies == pytest.approx(stored[:3])
    assert len(stored) == saved["settings"]["paths"] == 300


def test_again_nothing_is_trained_and_other_settings_are_refused(studied, greedynas, macro_truth):
    folder, arguments = studied
    before = (folder / "parts" / "greedy-0.json").read_text()
    same = [argument if argument != "fashion" else "elsewhere/" for argument in arguments]  # the images are not needed
    code, out, _ = greedynas("study", "macro", "--truth", macro_truth, "--out", folder, *same)
    assert code == 0
    assert "4 of 4 parts are there already" in out
    assert (folder / "parts" / "greedy-0.json").read_text() == before
    code, _, err = greedynas("study", "macro", "--truth", macro_truth, "--out", folder, *same, "--set", "greedy.lr=0.3")
    assert code == 2
    assert "part greedy-0 with other settings: config.train.lr is 0.1 there, 0.3 here" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--paths", 20], "too few paths for a correlation: --paths 20"),
        (["--method", "gredy"], "unknown method 'gredy' (did you mean 'greedy'?)"),
        (["--bn", "none"], "unknown BatchNorm mode 'none'"),
        (["--greedy-share", 2], "--greedy-share is a share of the others' cost"),
        (["--greedy-share", 0.5, "--method", "fair"], "add --method greedy"),
        (["--set", "space=fashion"], "the ground truth is that of space macro, not of fashion"),
        (["--set", "greedy.speed=2"], "unknown setting 'speed'"),
        (["--jobs", 1, "--seeds", 1], "name the data with --data"),
        (["--data", "nowhere/", "--jobs", 1, "--seeds", 1], "nowhere"),
    ],
)
def test_wrong_input_gets_one_line(greedynas, tmp_path, macro_truth, arguments, told):
    code, _, err = greedynas("study", "macro", "--truth", macro_truth, "--out", tmp_path / "study", *arguments)
    assert code == 2
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_truth_that_is_not_one_is_refused_before_any_work(greedynas, tmp_path):
    (tmp_path / "truth.json").write_text("{}")
    code, _, err = greedynas("study", "macro", *SMALL, "--truth", tmp_path / "truth.json", "--out", tmp_path / "study")
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
    assert part.settings["own_epochs"] is None  # those that were chosen for the whole cost
    assert part.settings["cost_epochs"] == pytest.approx(30.5)
    assert part.settings["config"]["seed"] == 3


def test_each_method_starts_from_what_suits_it():
    preset = load_config("cifar10")
    assert set(preset.samplers) == {"uniform", "fair"}
    for method in METHODS:
        expected = {**preset.train.model_dump(), **preset.samplers.get(method, {}), "sampler": method}
        assert method_config(method, MacroOptions({})).train.model_dump() == expected
    rates = [method_config(method, MacroOptions({"lr": 0.07})).train.lr for method in METHODS]
    assert rates == [0.07] * 3  # what is asked for counts


@pytest.mark.parametrize("changes", [{}, {"fair.max_epochs": 40}])
def test_fair_trains_no_longer_than_is_best_for_it_unless_told(changes):
    options = MacroOptions(changes, epochs=150)
    config = method_config("fair", options)
    epochs = changes.get("fair.max_epochs", load_config("cifar10").samplers["fair"]["max_epochs"])
    assert with_epochs(config, 45_000, make_part("fair", 0, config, options).settings).train.max_epochs == epochs
    cheap = make_part("fair", 0, config, MacroOptions({}, epochs=21)).settings
    assert with_epochs(config, 45_000, cheap).train.max_epochs == 7  # of three paths each


def test_a_part_does_not_depend_on_what_suits_other_methods():
    options = MacroOptions({}, epochs=50)
    config = method_config("greedy", options)
    other = config.model_copy(update={"samplers": {"uniform": {"lr": 7.0}, "fair": {}}})
    assert make_part("greedy", 0, config, options).settings == make_part("greedy", 0, other, options).settings
    uniform = method_config("uniform", options)
    assert make_part("uniform", 0, uniform, options).settings["config"]["samplers"] == {
        "uniform": uniform.samplers["uniform"]
    }


def test_a_method_may_not_train_longer_than_the_others(greedynas, tmp_path, macro_truth):
    code, _, err = greedynas(
        "study", "macro", "--truth", macro_truth, *SMALL, "--method", "uniform", "--seeds", 1,
        "--set", "uniform.max_epochs=9", "--out", tmp_path / "study",
    )  # fmt: skip
    assert code == 2
    assert "uniform.max_epochs=9 costs more than --epochs 3 allows: at most 3" in err


@pytest.mark.parametrize("sampler", ["uniform", "fair", "greedy"])
@pytest.mark.parametrize("bn", ["batch", "recalibrate"])
def test_epochs_within_a_cost(sampler, bn):
    """As many as fit, and not one fewer."""
    settings = load_config("cifar10", {"sampler": sampler, "train.bn": bn, "filter_images": 300}).train
    allowed = 60 * 45_000
    epochs = epochs_within(settings, 45_000, allowed, 3)

    def cost(count):
        return corrected_images(*Schedule(settings.model_copy(update={"max_epochs": count}), 45_000).predicted_images(num_ops=3))  # fmt: skip

    assert cost(epochs) <= allowed < cost(epochs + 1)
    assert epochs_within(settings, 45_000, 10, 3) == 0
    assert epochs == {"uniform": 60, "fair": 20}.get(sampler, epochs)


def test_quick_is_small():
    found = quick(MacroOptions({}, seeds=(7, 8)))
    assert (found.seeds, found.epochs, found.paths, found.images) == ((7,), 6.0, 1000, 150)
    assert method_config("greedy", found).data.val_images == 0.96
    assert {method_config(method, found).train.batch_size for method in METHODS} == {64}
    assert method_config("fair", found).train.lr < method_config("uniform", found).train.lr
    assert method_config("fair", replace(found, changes={"lr": 0.2})).train.lr == 0.2  # what is asked for counts


def test_measures_of_the_truth_itself(truth):
    found = measures(truth, truth.accuracies)
    assert found["all"] == {
        "tau_a": pytest.approx(1, abs=1e-3),
        "tau_b": pytest.approx(1),
        "spearman": pytest.approx(1),
    }
    assert found["precision"] == 1
    assert found["found"]["unlimited"]["rank"] == 1
    assert found["found"]["unlimited"]["path"] == "".join(map(str, truth.paths[truth.accuracies.argmax()]))
    assert found["found"]["60M"]["macs"] <= 60_000_000
    assert found["found"]["60M"]["behind_best"] == 0


def test_of_equal_scores_the_lower_loss_is_found(truth):
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
    assert found["high"] - found["low"] == pytest.approx(0, abs=1e-9)  # what seeds share is gone
    assert summarised(ours)["all.tau_b"]["mean"] == pytest.approx(0.815)


def test_a_cost_that_does_not_pay_for_one_epoch():
    with pytest.raises(GreedyNASError, match=r"one epoch of greedy training costs more than 0\.5 epochs"):
        within_cost(load_config("cifar10"), 45_000, 0.5)


def test_it_runs_where_neither_pymoo_nor_plotly_is():
    code = (
        "import sys, greedynas.studies.macro, greedynas.studies.ranking; print({'pymoo', 'plotly'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
