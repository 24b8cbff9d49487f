import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from greedynas.greedy.evaluation import evaluate_paths
from greedynas.jobs.resolving import load_config
from greedynas.runtime.rng import stream
from greedynas.settings.schema import Config
from greedynas.spaces.space import load_space
from greedynas.stages.run import config_text, read_run_config
from greedynas.stages.train import train_stage
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.ranking.run import random_paths
from greedynas.studies.supernets import load_trained, new_supernet

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET = Console(quiet=True)
CHANGES = {"max_epochs": 2, "data.val_images": 100, "filter_images": 20, "bn_images": 20, "lr": 0.1, "batch_size": 256,
           "checkpoint_steps": 20, "keep_checkpoints": 5, "image_size": 14}  # fmt: skip
FEW = ["--paths", 60, "--images", 10, "--images", 40, "--draws", 2, "--jobs", 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a greedy run on the embedded sample, with four checkpoints."""
    folder = tmp_path_factory.mktemp("ranking") / "run"
    train_stage(load_config("fashion", CHANGES), folder, QUIET)
    return folder


@pytest.fixture(scope="module")
def studied(run):
    """Run the study of that run, including the training of a uniform rival."""
    from greedynas.studies.ranking.run import RankingOptions, study_ranking

    options = RankingOptions(train_uniform=True, paths=60, images=(10, 40), draws=2, jobs=1)
    return study_ranking(run, run / "studies" / "ranking", options, QUIET)


def test_the_study_has_all_kinds_and_modes_and_checkpoints(run, studied):
    rows = studied["results"]["supernets"]
    last = {(row["kind"], row["bn"]) for row in rows}
    assert last == {
        (kind, bn) for kind in ("untrained", "uniform", "greedy") for bn in ("batch", "recalibrate", "running")
    }
    steps = sorted({row["step"] for row in rows if row["kind"] == "greedy"})
    kept = sorted(int(file.name.split("-")[1]) for file in (run / "supernet").glob("step-*"))
    assert steps == kept
    assert len(kept) >= 3
    curve = next(row for row in rows if (row["kind"], row["bn"], row["step"]) == ("greedy", "batch", kept[-1]))["curve"]
    assert [point["images"] for point in curve] == [10, 20, 40]
    page = (run / "studies" / "ranking" / "study.html").read_text()
    for text in ("Table 3", "Figure 4, left", "Figure 4, right", "0.961"):
        assert text in page


def test_the_rival_costs_at_most_as_much(run, studied):
    rival = json.loads((run / "studies" / "ranking" / "parts" / "train-uniform.json").read_text())
    ours = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert rival["result"]["evaluation_images"] == 0
    an_epoch = rival["result"]["optimization_images"] / rival["result"]["epochs"]
    assert 0 <= ours["corrected_images"] - rival["result"]["corrected_images"] < an_epoch


def test_the_numbers_are_those_of_the_definition(run, studied):
    """Compute the correlation of the loss on 20 filter images with the accuracy on all 100 again."""
    config = read_run_config(run)
    trained = load_trained(run, config)
    paths = random_paths(trained.net.space, 60, config.seed)
    images, labels = trained.data.val.eval_batch()
    whole = evaluate_paths(
        trained.net, paths, images, labels, "batch", bn_images=500, precision=trained.accuracies.precision
    )
    taus = []
    for draw in range(2):
        few = trained.data.val.balanced(20, stream(config.seed, "ranked by few", 20, draw))
        found = evaluate_paths(
            trained.net, paths, images[few], labels[few], "batch", bn_images=20, precision=trained.accuracies.precision
        )
        taus.append(rank_correlations(-found.losses, whole.accuracies)["tau_a"])
    row = [row for row in studied["results"]["supernets"] if (row["kind"], row["bn"]) == ("greedy", "batch")]
    row = max(row, key=lambda one: one["step"])
    assert row["at_filter"]["loss"]["tau_a"] == pytest.approx(np.mean(taus), abs=1e-6)
    assert row["mean_accuracy"] == pytest.approx(whole.accuracies.mean())


def test_an_untrained_supernet_is_the_one_that_training_starts_from(run):
    config = read_run_config(run)
    one, two = new_supernet(config), new_supernet(config)
    assert all((a == b).all() for a, b in zip(one.net.parameters(), two.net.parameters(), strict=True))


def test_the_command_continues_the_study(run, studied, run_cli):
    code, out, _ = run_cli("study", "ranking", run, "--train-uniform", *FEW)
    assert code == 0
    assert "parts are already finished" in out
    assert "Table 3" in out
    assert "the paper: τ" in out
    uniform = run / "studies" / "ranking" / "parts" / "train-uniform"
    code, out, _ = run_cli("study", "ranking", run, "--uniform", uniform, *FEW, "--json")
    assert code == 0
    assert json.loads(out)["study"] == "ranking"


def test_random_paths_are_distinct():
    paths = random_paths(load_space("fashion"), 500, 3)
    assert len(set(paths)) == len(paths) == 500
    assert paths == random_paths(load_space("fashion"), 500, 3)
    assert len(random_paths(load_space("fashion"), 10_000, 3)) == 2187  # all paths of the space


def test_wrong_input_gives_a_one_line_error(run_cli, run, tmp_path):
    empty = tmp_path / "empty"
    shutil.copytree(run, empty, ignore=shutil.ignore_patterns("step-*", "studies"))
    for arguments, message in [
        ([empty], "has no checkpoints of a supernet; train one with greedynas train"),
        ([tmp_path / "nothing"], "is not a run directory"),
        ([run, "--paths", 5], "a rank correlation of 5 paths is not meaningful; take at least 30"),
        ([run, "--uniform", run], "was trained with sampler greedy, not uniform"),
    ]:
        code, _, err = run_cli("study", "ranking", *arguments, "--out", tmp_path / "study")
        assert code == 2
        assert message in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "study").exists()


def test_a_uniform_run_of_another_space_is_refused(run_cli, run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = read_run_config(run)
    space = load_space("macro")
    train = config.train.model_copy(update={"sampler": "uniform"})
    (other / "config.yaml").write_text(config_text(Config(name="other", space=space, train=train)))
    code, _, err = run_cli("study", "ranking", run, "--uniform", other, *FEW, "--out", tmp_path / "study")
    assert code == 2
    assert "is of space macro" in err


def test_a_damaged_checkpoint_is_named(run_cli, run, tmp_path):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(run, spoiled, ignore=shutil.ignore_patterns("studies"))
    newest = max((spoiled / "supernet").glob("step-*"))
    newest.write_bytes(newest.read_bytes()[:-100])
    code, _, err = run_cli("study", "ranking", spoiled, *FEW)
    assert code == 2
    assert f"{newest.name} cannot be read" in err
