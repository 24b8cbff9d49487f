"""Tests of `study searchers`: what a table gives, what regret is, and the command."""

import itertools
import json

import numpy as np
import pytest

from greedynas import GreedyNASError
from greedynas.greedy.searchers import SEARCHERS
from greedynas.studies.searchers import tables
from greedynas.studies.searchers.run import best_so_far, parse_limits
from greedynas.studies.searchers.tables import find_tables, open_table, read_rows


@pytest.fixture
def csv_file(tmp_path):
    """All paths of 3 x 2 x 4 decisions, with words and numbers, and a second training of the first one."""
    lines = ["kernel,kind,width,accuracy,macs,latency"]
    for i, (kernel, kind, width) in enumerate(itertools.product((3, 5, 11), ("b", "a"), (8, 16, 24, 100))):
        lines.append(f"{kernel},{kind},{width},{50 + i} {52 + i},{kernel * width},{'' if i == 23 else i / 10}")
    file = tmp_path / "trained.csv"
    file.write_text("\n".join([*lines, "3,b,8,61,24,0"]) + "\n")
    return file


def test_rows_are_read_with_numbers_in_order_and_repeated_rows_averaged(csv_file):
    rows = read_rows(csv_file)
    assert rows.decisions == (("3", "5", "11"), ("a", "b"), ("8", "16", "24", "100"))
    assert len(rows.paths) == 24
    values = dict(zip(map(tuple, rows.paths.tolist()), rows.accuracies.tolist(), strict=True))
    assert values[0, 1, 0] == (51 + 61) / 2
    assert values[2, 0, 3] == 50 + 23 + 1
    assert set(rows.costs) == {"macs", "latency"}


def test_a_path_of_digits_is_split(tmp_path):
    file = tmp_path / "cells.csv"
    file.write_text('"path(1<-0,2<-0)",test_acc_seeds\n012,10.0 20.0\n101,30.0\n')
    rows = read_rows(file)
    assert rows.paths.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert rows.accuracies.tolist() == [15, 30]


@pytest.mark.parametrize("searcher", ["model", "evolution", "aging", "local", "random"])
def test_a_search_of_rows_keeps_its_limits_and_ends_with_the_best(csv_file, searcher):
    """A row without a price is not within a limit on it; row 22 is the best that has one."""
    problem = open_table("csv", str(csv_file), {"latency": 3.0, "macs": 300})
    assert problem.best == 73 - 0  # 11 x 24: the row of 11 x 100 has too many macs
    curve = best_so_far(problem, searcher, 4, 40, 0)
    assert len(curve) == 40
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == problem.best
    if searcher == "model":
        assert curve[0] < problem.best


def test_a_table_with_some_of_the_paths_is_searched_in_its_rows(tmp_path):
    rng = np.random.default_rng(0)
    paths = np.unique(rng.integers(0, 4, (300, 10)), axis=0)
    effects = rng.normal(size=(10, 4))
    lines = [",".join(map(str, [*path, effects[np.arange(10), path].sum()])) for path in paths.tolist()]
    file = tmp_path / "some.csv"
    file.write_text("\n".join([",".join([*(f"d{i}" for i in range(10)), "top1"]), *lines]))
    problem = open_table("csv", str(file), {})
    rows = set(map(tuple, paths.tolist()))
    near = problem.task.neighbours(tuple(paths[0].tolist()))
    assert set(near) <= rows - {tuple(paths[0].tolist())}
    assert len(near) == tables.NEAREST
    worst = [best_so_far(problem, name, 20, 80, 1)[-1] for name in ("model", "evolution", "aging", "local")]
    assert worst[0] == problem.best
    assert min(worst) > np.median(effects.sum())


def test_the_best_of_macro_is_that_of_its_feasible_paths(synthetic_truth):
    truth = json.loads(synthetic_truth.read_text())
    for limit in (None, 50_000_000):
        problem = open_table("macro", str(synthetic_truth), {} if limit is None else {"macs": limit})
        accuracies = {
            path: np.mean(one["test_acc"]) for path, one in truth.items() if not limit or one["flops"] <= limit
        }
        best = max(accuracies, key=accuracies.get)
        assert problem.best == pytest.approx(accuracies[best])
        assert problem.values([tuple(map(int, best))])[0] == problem.best


def test_the_regret_is_that_of_the_evaluations_in_order(csv_file):
    """Proposals are of several paths, but the curve has a value for each of them."""
    problem = open_table("csv", str(csv_file), {})
    asked = []

    def in_order(plan):
        asked.extend(plan.task.paths.tolist())
        for start in range(0, 24, 7):
            yield asked[start : start + 7]

    SEARCHERS._found["test-in-order"] = in_order
    try:
        curve = best_so_far(problem, "test-in-order", 7, 30, 0)
    finally:
        del SEARCHERS._found["test-in-order"]
    values = problem.values(asked)
    assert curve[:24].tolist() == np.maximum.accumulate(values).tolist()
    assert curve[24:].tolist() == [max(values)] * 6


def test_synthetic_accuracies_do_not_depend_on_the_other_paths():
    problem = open_table("synthetic", None, {"macs": 330e6})
    paths = problem.task.sample(20, np.random.default_rng(0))
    together = problem.values(paths)
    assert [problem.values([path])[0] for path in paths] == together
    assert np.std(together) > 0.5


def test_the_command_writes_resumes_and_prints_the_study(run_cli, tmp_path, csv_file):
    arguments = (
        "study",
        "searchers",
        csv_file,
        "--searcher",
        "model",
        "--searcher",
        "random",
        "--seeds",
        3,
        "--population",
        4,
    )
    arguments += (
        "--evaluations",
        20,
        "--limit",
        "none",
        "--limit",
        "macs=300",
        "--jobs",
        1,
        "--out",
        tmp_path / "study",
    )
    code, out, _ = run_cli(*arguments)
    assert code == 0
    assert "trained, macs ≤ 300: 3 seeds" in out
    assert "model against random" in out
    code, out, _ = run_cli(*arguments, "--json")
    assert code == 0
    first, second = json.loads(out)["results"]["problems"]
    assert (first["limits"], second["limits"]) == ({}, {"macs": 300})
    summary = first["searchers"]["model"]
    part = json.loads((tmp_path / "study/parts/trained-all-model-0to2.json").read_text())
    with np.load(tmp_path / "study/parts/trained-all-model-0to2.npz") as arrays:
        regrets = part["result"]["best"] - arrays["curves"][:, -1]
    assert summary["regret"]["20"]["mean"] == pytest.approx(regrets.mean())
    assert summary["found"]["20"] == (regrets <= 1e-9).mean()
    assert (tmp_path / "study/study.html").exists()


def test_recorded_supernets_are_one_group(tmp_path):
    (tmp_path / "run" / "parts").mkdir(parents=True)
    for seed in range(2):
        np.savez(tmp_path / f"run/parts/greedy-{seed}.npz", batch_accuracy=np.random.default_rng(seed).random(6561))
    np.savez(tmp_path / "run/parts/nwot-0.npz", scores=np.zeros(3))
    found = find_tables([str(tmp_path / "run")], None)
    assert [(table.name, table.group) for table in found] == [("greedy-0", "run"), ("greedy-1", "run")]
    problem = open_table("supernet", found[0].file, {"macs": 50e6})
    assert 0 < problem.best < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown table 'nothing'"),
        (["synthetic", "--searcher", "bayes"], "unknown searcher"),
        (["synthetic", "--limit", "macs"], "--limit takes none or COST=VALUE"),
        (["synthetic", "--limit", "beauty=3"], "no cost 'beauty'"),
        (["FILE", "--limit", "beauty=3"], "no cost 'beauty'"),
        (["FILE", "--limit", "macs=1"], "no row within"),
    ],
)
def test_wrong_arguments_give_a_one_line_error(run_cli, tmp_path, csv_file, arguments, message):
    arguments = [csv_file if one == "FILE" else one for one in arguments]
    code, _, err = run_cli("study", "searchers", *arguments, "--out", tmp_path / "study")
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column of accuracies"),
        ("a,accuracy\n", "no rows"),
        ("a,accuracy\n1,x\n", "a cell that is no number"),
        ("a,accuracy\n1\n", "does not fit"),
        ("accuracy,macs\n1,2\n", "no decisions"),
        ("", "not a CSV file"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, message):
    file = tmp_path / "broken.csv"
    file.write_text(text)
    with pytest.raises(GreedyNASError, match=message):
        read_rows(file)


def test_limits_are_read():
    assert parse_limits(None) is None
    assert parse_limits(["none", "macs=60M", "macs=415.5,params=2M"]) == (
        (), (("macs", 60e6),), (("macs", 415.5), ("params", 2e6)),
    )  # fmt: skip
