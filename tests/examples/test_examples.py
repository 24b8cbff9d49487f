"""Each script in examples/ runs to its end at a small size, with the command that its docstring shows."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
SECONDS = 300  # on a busy machine; on an idle one, each takes about ten


def run_example(name, tmp_path, *arguments):
    """Run a script in a folder of its own, on one thread; return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_folder_of_images_becomes_a_network(tmp_path):
    out = run_example("own_folder", tmp_path, "--out", "runs/photos")
    assert re.search(r"RunRecord\('runs/photos', exported, \d+\.\d% top-1\)", out)
    assert "circle/0000.png: " in out
    assert "Classes: circle, square, triangle" in out
    assert {"report.html", "model.onnx"} <= {file.name for file in (tmp_path / "runs" / "photos").iterdir()}


def test_a_custom_op_and_sampler_work_in_the_whole_job(tmp_path):
    out = run_example("own_op_and_sampler", tmp_path, "--out", str(tmp_path))
    assert "as PyTorch counts them" in out
    assert re.search(r"LatencyTable\('ghosts' at 28 px.*\) \d+\.\d+ ms", out)
    assert re.search(r"by-command\s+trained\s+ghosts\s+sandwich", out)
    assert "GHOST_K3" in (tmp_path / "network.svg").read_text()


def test_a_searcher_with_optuna_finds_paths(tmp_path):
    pytest.importorskip("optuna")
    out = run_example("own_searcher", tmp_path)
    best = {name: float(accuracy) for name, accuracy in re.findall(r"^(\w+) +Searched\(.*best (\d\.\d+)\)", out, re.M)}
    assert set(best) == {"tpe", "random", "evolution"}
    assert min(best.values()) > 0.3  # chance is 0.1


def test_without_optuna_the_searcher_says_what_to_install(tmp_path):
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError(\"No module named 'optuna'\", name='optuna')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, str(EXAMPLES / "own_searcher.py"), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this example needs Optuna, which is not installed: pip install optuna\n"


def test_a_supernet_trains_on_a_torch_dataset(tmp_path):
    assert re.search(r"trained\) 192 48 \['circle', 'square', 'triangle'\]", run_example("own_dataset", tmp_path))


def test_a_callback_stops_training(tmp_path):
    out = run_example("stop_training", tmp_path)
    assert re.search(r"^\d+ of 18 epochs: a path has a loss of \d\.\d\d$", out, re.M)


def test_ten_paths_are_ranked(tmp_path):
    accuracies = [
        float(value) for value in re.findall(r"^(\d+\.\d)% (?:ID|MB)", run_example("rank_paths", tmp_path), re.M)
    ]
    assert len(accuracies) == 10
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > 30


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_examples_use_only_public_names(file):
    import greedynas

    text = file.read_text()
    assert not re.search(r"^\s*(from greedynas|import greedynas\.)", text, re.M)
    used = set(re.findall(r"\bgreedynas\.([A-Za-z_]+)", text.partition('"""')[2].partition('"""')[2]))
    assert used <= set(dir(greedynas))


@pytest.mark.parametrize("name", ["own_dataset", "stop_training", "rank_paths"])
def test_small_examples_have_at_most_twenty_lines(name):
    text = (EXAMPLES / f"{name}.py").read_text().partition('"""')[2].partition('"""')[2]
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"\s*(#|import |from |\"\"\")", line)]
    assert len(lines) <= 20
