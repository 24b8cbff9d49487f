"""Tests of `experimental.shifting`: a search goes on training on the paths that it considers best."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from greedynas.rundir.checkpoints import Checkpoints
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.experiments import hooks_of
from greedynas.stages import search
from greedynas.stages.search import make_requests, search_stage
from tests.helpers.run_directories import content
from tests.helpers.training import recorded

pytestmark = pytest.mark.usefixtures("one_thread")
NO_LIMITS = {"macs": (None, None), "params": (None, None), "latency_ms": (None, None)}
ASSIGNED = ["population=4", "generations=4"]


def run_search(folder, data, name="shifted"):
    requests = make_requests(folder, NO_LIMITS, "evolution", (), True, name, ASSIGNED, None)
    return search_stage(folder, requests, None, Console(quiet=True), data)[0]


def weights(folder):
    """Return the weights of the newest checkpoint in a folder."""
    tensors, state = Checkpoints(folder).load()
    return {name: tensor for name, tensor in tensors.items() if name.startswith("net.")}, state


@pytest.fixture
def run(data, tmp_path):
    recorded(tmp_path / "run", data, experimental={"shifting": 0.5})
    return tmp_path / "run"


def test_the_second_half_ranks_paths_on_a_supernet_that_was_trained_on_the_best_of_the_first(run, data):
    before = content(run / "supernet")
    result = run_search(run, data)
    assert content(run / "supernet") == before  # the run keeps its supernet
    first = json.loads((run / "searches" / "shifted" / "first.json").read_text())["found"]
    assert {generation for _, _, generation in first} == {0, 1}
    assert {entry["generation"] for entry in result["found"]} == {2, 3}
    after, state = weights(run / "searches" / "shifted" / "shifted" / "supernet")
    plain, _ = weights(run / "supernet")
    assert any(not torch.equal(after[name], plain[name]) for name in plain)
    best = sorted(first, key=lambda entry: -entry[1])[:4]
    assert sorted(path for path, _, _ in state["pool"]["entries"]) == sorted(path for path, _, _ in best)
    # The second half starts from the paths that were trained, and finds other accuracies for them.
    again = {tuple(entry["path"]): entry["accuracy"] for entry in result["found"]}
    assert {tuple(path) for path, _, _ in best} <= set(again)
    assert result["chosen"]["path"] in [entry["path"] for entry in result["found"]]


@pytest.mark.parametrize("generation", [1, 2, 4])  # of the evaluation that fails: in the first half, in the second half
def test_an_interrupted_search_ends_as_one_that_was_not(run, data, generation, monkeypatch):
    whole = run_search(run, data, "whole")

    class Interruption(Exception):
        pass

    written, write = [], search.write_json

    def write_and_fail(file, value):
        write(file, value)
        written.append(file)
        if len(written) == generation:
            raise Interruption

    monkeypatch.setattr(search, "write_json", write_and_fail)
    with pytest.raises(Interruption):
        run_search(run, data, "killed")
    monkeypatch.setattr(search, "write_json", write)
    resumed = run_search(run, data, "killed")
    assert resumed["found"] == whole["found"]
    assert resumed["chosen"]["path"] == whole["chosen"]["path"]
    same = [weights(run / "searches" / name / "shifted" / "supernet")[0] for name in ("whole", "killed")]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


def test_two_searches_of_one_run_both_start_from_its_supernet(run, data):
    """The second one would find other accuracies if the first one had changed the weights that they share."""
    limits = {**NO_LIMITS, "macs": (["60K", "60001"], None)}
    requests = make_requests(run, limits, "evolution", (), True, None, ASSIGNED, None)
    one, two = search_stage(run, requests, None, Console(quiet=True), data)
    firsts = [
        json.loads((run / "searches" / result["name"] / "first.json").read_text())["found"] for result in (one, two)
    ]
    assert np.allclose([entry[1] for entry in firsts[0]], [entry[1] for entry in firsts[1]])


def test_only_the_paths_of_the_pool_are_trained(run, data, monkeypatch):
    from greedynas.greedy import training

    drawn = []
    monkeypatch.setattr(training, "draw_updates", recording(training.draw_updates, drawn))
    run_search(run, data)
    first = json.loads((run / "searches" / "shifted" / "first.json").read_text())["found"]
    best = {tuple(path) for path, _, _ in sorted(first, key=lambda entry: -entry[1])[:4]}
    assert drawn
    assert set(drawn) <= best


def recording(draw_updates, drawn):
    def draw(sampler, state):
        result = draw_updates(sampler, state)
        drawn.extend(path for update in result.updates for path in update)
        return result

    return draw


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "half"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(GreedyNASError, match=r"experimental\.shifting must be a share of epochs between 0 and 1"):
        hooks_of({"shifting": share})
