import json

import numpy as np
import pytest

from greedynas.errors import GreedyNASError
from greedynas.space import load_space
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.truth import find_truth, read_truth
from tests.test_training import tiny_space


@pytest.fixture(scope="module")
def truth(macro_truth):
    return read_truth(macro_truth)


def tau_b(truth, scores):
    return rank_correlations(scores, truth.accuracies)["tau_b"]


def test_the_known_facts_about_it(truth):
    best = truth.accuracies.argmax()
    assert (len(truth.paths), len(truth.distinct)) == (6561, 3969)
    assert truth.paths[best].tolist() == [2, 2, 2, 1, 2, 2, 0, 2]
    assert truth.accuracies[best] == pytest.approx(93.127, abs=5e-4)
    assert truth.accuracies[0] == pytest.approx(45.363, abs=5e-4)  # nothing but identities
    assert (truth.accuracies.mean(), truth.accuracies.std()) == pytest.approx((90.247, 2.683), abs=5e-4)


def test_paths_of_one_network_have_one_truth(truth):
    assert (truth.accuracies == truth.accuracies[truth.network]).all()
    assert (truth.network[truth.distinct] == truth.distinct).all()


def test_the_trivial_rankings(truth):
    found = {name: tau_b(truth, scores) for name, scores in truth.trivial_rankings().items()}
    assert found == pytest.approx({"FLOPs": 0.556, "parameters": 0.218, "non-ID ops": 0.693}, abs=5e-4)


def test_an_additive_model_fitted_to_the_truth(truth):
    assert tau_b(truth, truth.additive_model()) == pytest.approx(0.865, abs=5e-4)


def test_one_training_against_the_mean_of_the_others(truth):
    found = [
        rank_correlations(truth.trainings[:, i], np.delete(truth.trainings, i, 1).mean(1))["tau_b"] for i in range(3)
    ]
    assert np.mean(found) == pytest.approx(0.896, abs=1e-3)


def test_the_noise_ceiling(truth):
    """About 0.949. The noise behind it is that of the trainings: simulated ones agree as well as the real ones do."""
    found = [tau_b(truth, truth.perfect_predictor(draw)) for draw in range(5)]
    assert np.mean(found) == pytest.approx(0.949, abs=2e-3)
    assert np.std(found) < 2e-3
    noise = np.random.default_rng(0).standard_normal((6561, 3))[truth.network] * truth.deviations[:, None]
    simulated = truth.accuracies[:, None] + noise
    assert rank_correlations(simulated[:, 0], simulated[:, 1:].mean(1))["tau_b"] == pytest.approx(0.896, abs=3e-3)


def test_some_of_the_paths(truth):
    chosen = np.array([5, 700, 701, 3000])
    some = truth.only(chosen)
    assert (some.accuracies == truth.accuracies[chosen]).all()
    assert (some.macs == truth.macs[chosen]).all()
    everything = truth.only(np.arange(0, 6561, 2))
    assert (everything.accuracies == everything.accuracies[everything.network]).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "it is not JSON"),
        ("[]", "it has no three accuracies, FLOPs and parameters of network 00000000"),
        ('{"00000000": {"test_acc": [1, 2, 3], "flops": 1, "params": 1}}', "of network 00000001"),
        ('{"00000000": {"test_acc": [1, 2, 300], "flops": 1, "params": 1}}', "of network 00000000"),
        ('{"00000000": {"test_acc": "abc", "flops": 1, "params": 1}}', "of network 00000000"),
    ],
)
def test_a_file_that_is_not_the_truth(tmp_path, text, why):
    file = tmp_path / "truth.json"
    file.write_text(text)
    with pytest.raises(GreedyNASError, match=f"truth.json is not NAS-Bench-Macro's ground truth: .*{why}"):
        read_truth(file)


def test_a_file_of_other_networks(tmp_path, macro_truth):
    data = json.loads(macro_truth.read_text())
    data["22222222"]["flops"] += 1
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(GreedyNASError, match="its FLOPs or parameters are not those of space macro"):
        read_truth(tmp_path / "other.json")


def test_no_file(tmp_path, monkeypatch):
    with pytest.raises(GreedyNASError, match=r"missing.json cannot be read: No such file"):
        read_truth(tmp_path / "missing.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GreedyNASError, match="--truth FILE"):
        find_truth(None)


def test_another_space(macro_truth):
    with pytest.raises(GreedyNASError, match="the ground truth is that of space macro, not of tiny"):
        read_truth(macro_truth, tiny_space())
    read_truth(macro_truth, load_space("macro").adapt(num_classes=3, image_size=16))  # the same layers
