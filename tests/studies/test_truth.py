import json
from dataclasses import replace

import numpy as np
import pytest

from greedynas.runtime.errors import GreedyNASError
from greedynas.spaces.paths import canonical
from greedynas.spaces.space import load_space
from greedynas.studies.correlations import rank_correlations
from greedynas.studies.truth import find_truth, read_truth
from tests.helpers.synthetic_files import deviation
from tests.helpers.training import tiny_space


@pytest.fixture(scope="module")
def published(macro_truth):
    return read_truth(macro_truth)


@pytest.fixture(scope="module")
def truth(synthetic_truth):
    return read_truth(synthetic_truth)


def tau_b(truth, scores):
    return rank_correlations(scores, truth.accuracies)["tau_b"]


# The published file


def test_known_facts_of_the_published_file(published):
    best = published.accuracies.argmax()
    assert (len(published.paths), len(published.distinct)) == (6561, 3969)
    assert published.paths[best].tolist() == [2, 2, 2, 1, 2, 2, 0, 2]
    assert published.accuracies[best] == pytest.approx(93.127, abs=5e-4)
    assert published.accuracies[0] == pytest.approx(45.363, abs=5e-4)  # only identities
    assert (published.accuracies.mean(), published.accuracies.std()) == pytest.approx((90.247, 2.683), abs=5e-4)
    assert (published.accuracies == published.accuracies[published.network]).all()


def test_the_trivial_rankings(published):
    found = {name: tau_b(published, scores) for name, scores in published.trivial_rankings().items()}
    assert found == pytest.approx({"FLOPs": 0.556, "parameters": 0.218, "non-ID ops": 0.693}, abs=5e-4)


def test_an_additive_model_fitted_to_the_truth(published):
    assert tau_b(published, published.additive_model()) == pytest.approx(0.865, abs=5e-4)


def test_one_training_against_the_mean_of_the_others(published):
    trainings = published.trainings
    found = [rank_correlations(trainings[:, i], np.delete(trainings, i, 1).mean(1))["tau_b"] for i in range(3)]
    assert np.mean(found) == pytest.approx(0.896, abs=1e-3)


def test_the_noise_ceiling(published):
    """Check that it is about 0.949, and that trainings with the simulated noise agree as well as the real ones."""
    found = [tau_b(published, published.perfect_predictor(draw)) for draw in range(5)]
    assert np.mean(found) == pytest.approx(0.949, abs=2e-3)
    assert np.std(found) < 2e-3
    noise = np.random.default_rng(0).standard_normal((6561, 3))[published.network] * published.deviations[:, None]
    simulated = published.accuracies[:, None] + noise
    assert rank_correlations(simulated[:, 0], simulated[:, 1:].mean(1))["tau_b"] == pytest.approx(0.896, abs=3e-3)


# Reading and using such a file


def test_a_file_is_read_path_by_path(truth, synthetic_truth):
    entries = json.loads(synthetic_truth.read_text())
    assert len(truth.paths) == len(entries) == 6561
    assert len(truth.distinct) == 3969
    for i in range(0, 6561, 91):
        entry = entries["".join(map(str, truth.paths[i]))]
        assert truth.trainings[i].tolist() == entry["test_acc"]
        assert truth.accuracies[i] == pytest.approx(entry["mean_acc"])
        assert (truth.macs[i], truth.params[i]) == (entry["flops"], entry["params"])


def test_paths_of_one_network_have_one_truth(truth):
    assert (truth.accuracies == truth.accuracies[truth.network]).all()
    assert (truth.network[truth.distinct] == truth.distinct).all()
    space = load_space("macro")
    for i in range(0, 6561, 91):
        assert tuple(truth.paths[truth.network[i]].tolist()) == canonical(truth.paths[i].tolist(), space)


def test_rankings_that_need_no_supernet(truth):
    found = truth.trivial_rankings()
    assert found["FLOPs"].tolist() == truth.macs.tolist()
    assert found["parameters"].tolist() == truth.params.tolist()
    assert found["non-ID ops"].tolist() == (truth.paths > 0).sum(1).tolist()


def test_the_additive_model_is_the_best_one(truth):
    """Check that its errors are unrelated to the ops, and that it fits an additive truth exactly."""
    model = truth.additive_model()
    for layer in range(8):
        for op in range(3):
            assert abs((truth.accuracies - model)[truth.paths[:, layer] == op].mean()) < 1e-8
    additive = replace(truth, trainings=np.repeat(model[:, None], 3, axis=1))
    assert additive.additive_model() == pytest.approx(model)
    assert 0.8 < tau_b(truth, model) < 0.95


def test_the_noise_of_one_training_is_found_from_networks_of_similar_accuracy(truth):
    """Compare with the synthetic truth, whose trainings vary by 0.15 points at 92% and by four times as much at 74%."""
    expected = deviation(truth.accuracies)
    usual = (truth.accuracies > 80) & (truth.accuracies < 91)
    assert truth.deviations[usual] == pytest.approx(expected[usual], rel=0.2)
    assert np.corrcoef(truth.deviations, expected)[0, 1] > 0.95


def test_a_perfect_predictor_is_as_far_from_the_truth_as_a_mean_of_three_trainings(truth):
    first, second = truth.perfect_predictor(0), truth.perfect_predictor(1)
    for scores in (first, second):
        np.testing.assert_allclose(scores, scores[truth.network], atol=0.02)  # one network, one noise
        noise = (scores - truth.accuracies)[truth.distinct] / deviation(truth.accuracies)[truth.distinct]
        assert noise.std() == pytest.approx(1 / np.sqrt(3), rel=0.1)
        assert abs(noise.mean()) < 0.05
    assert abs(np.corrcoef(first - truth.accuracies, second - truth.accuracies)[0, 1]) < 0.1
    assert (first == truth.perfect_predictor(0)).all()


def test_the_truth_can_be_restricted_to_some_paths(truth):
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
def test_a_file_that_is_not_the_truth_is_refused(tmp_path, text, why):
    file = tmp_path / "truth.json"
    file.write_text(text)
    with pytest.raises(GreedyNASError, match=f"truth.json is not NAS-Bench-Macro's ground truth: .*{why}"):
        read_truth(file)


def test_a_file_of_other_networks_is_refused(tmp_path, synthetic_truth):
    data = json.loads(synthetic_truth.read_text())
    data["22222222"]["flops"] += 1
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(GreedyNASError, match="its FLOPs or parameters are not those of space macro"):
        read_truth(tmp_path / "other.json")


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(GreedyNASError, match=r"missing.json cannot be read: No such file"):
        read_truth(tmp_path / "missing.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GreedyNASError, match="--truth FILE"):
        find_truth(None)


def test_another_space_is_refused(synthetic_truth):
    with pytest.raises(GreedyNASError, match="the ground truth is that of space macro, not of tiny"):
        read_truth(synthetic_truth, tiny_space())
    read_truth(synthetic_truth, load_space("macro").adapt(num_classes=3, image_size=16))  # the same layers
