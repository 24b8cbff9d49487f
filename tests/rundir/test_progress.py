"""Progress: bars in terminals and notebooks, lines in pipes and log files, and `progress.json` for other processes."""

import io
import json
import logging
import re
import time

import pytest

from greedynas.rundir import progress as module
from greedynas.rundir.progress import FILE, Progress, progress_files
from greedynas.runtime.terminal import make_console
from greedynas.runtime.text import logger
from tests.helpers.training import new_run, rows_of, same_tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")


def shown(width, what="supernet", **options):
    """Return the last state of the bar on a terminal of this width."""
    console = make_console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, **options)
    with Progress(console, what, 1962, may_end_early=True) as progress:
        progress._samples.extend([(time.monotonic() - 100, 100.0)])
        progress.update(
            210, ["loss 1.234", "epoch 3 of 18", "accuracy 61.2% (best path of the pool)", "8,123 images/s"]
        )
        text = console.render_lines(progress, pad=False)
    return ["".join(segment.text for segment in line) for line in text]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("what", ["supernet", "macs-800K-and-a-rather-long-name, 2 of 3", "鳥" * 30])
def test_the_bar_the_step_and_the_time_left_fit_every_terminal(width, what):
    (line,) = shown(width, what)
    assert len(line.rstrip()) <= width
    assert "210/1,962" in line
    assert re.search(r" [━╸]+ ", line)
    assert re.search(r"  \d+ min left" if width == 40 else r"  at most \d+ min left", line)


def test_a_wide_terminal_shows_the_details_in_their_order():
    (narrow,), (middle,), (wide,) = shown(60), shown(80), shown(200)
    assert "epoch" not in narrow
    assert "loss 1.234" in middle
    assert "loss 1.234  epoch 3 of 18  accuracy 61.2% (best path of the pool)  8,123 images/s" in wide


def stage(console, folder=None, seconds=0.4, **options):
    with Progress(console, "supernet", 100, folder=folder, **options) as progress:
        for step in range(1, 11):
            progress.update(step, [f"loss {1 / step:.3f}"], loss=1 / step)
            time.sleep(seconds / 10)
        yield progress


def test_a_pipe_gets_lines_and_the_log_gets_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 3)
    handler = logging.FileHandler(tmp_path / "log.txt", encoding="utf-8")
    logger.addHandler(handler)
    before, level = logger.level, logger.setLevel(logging.INFO)
    console = make_console(file=io.StringIO(), width=60, line_seconds=0.05)
    try:
        list(stage(console))
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
    lines = console.file.getvalue().splitlines()
    assert len(lines) >= 3
    assert all(re.match(r"supernet: step \d+ of 100 \(\d+%\), loss \d\.\d+, ", line) for line in lines)
    assert (tmp_path / "log.txt").read_text().splitlines() == lines
    assert level is None


def test_a_line_comes_even_if_a_step_takes_long_and_its_time_left_falls():
    console = make_console(file=io.StringIO(), width=200, line_seconds=0.1)
    with Progress(console, "search", 100, unit="path") as progress:
        progress._samples.append((time.monotonic() - 100, 0.0))
        progress.update(50)
        first = progress.seconds_left()
        time.sleep(0.5)  # one long generation
        assert progress.seconds_left() < first - 0.4
    assert len(console.file.getvalue().splitlines()) >= 2


def test_a_quiet_console_shows_nothing():
    console = make_console(file=io.StringIO(), quiet=True, line_seconds=0.02)
    list(stage(console, seconds=0.2))
    assert console.file.getvalue() == ""
    list(stage(None, seconds=0.1))


def test_steps_that_cost_more_count_more():
    progress = Progress(None, "supernet", 100, work=1000.0)
    progress._samples.append((time.monotonic() - 10, 0.0))
    progress.update(50, work=100.0)  # the cheap half
    assert progress.seconds_left() == pytest.approx(90, abs=1)


def test_other_processes_read_the_state_and_a_finished_stage_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_SECONDS", 0.0)
    console = make_console(file=io.StringIO(), width=60, line_seconds=0.05)
    (tmp_path / "models" / "a").mkdir(parents=True)
    for _ in stage(console, tmp_path / "models" / "a"):
        (file,) = progress_files(tmp_path)
        state = json.loads(file.read_text())
        assert (state["stage"], state["total"], state["details"]) == ("supernet", 100, [f"loss {state['loss']:.3f}"])
        assert abs(state["updated"] - time.time()) < 5
    assert list(progress_files(tmp_path)) == []
    failing = Progress(console, "supernet", 100, folder=tmp_path)
    failing.__enter__()
    time.sleep(0.3)
    failing.__exit__(RuntimeError, None, None)
    assert (tmp_path / FILE).exists()  # it says how far the stage was


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_SECONDS", 0.0)
    list(stage(make_console(file=io.StringIO(), line_seconds=0.02), tmp_path / "missing", seconds=0.2))


NOTEBOOK = """
import time
from greedynas.rundir.progress import Progress
from greedynas.runtime.terminal import make_console
with Progress(make_console(), "super<b>net", 4) as progress:
    for step in range(1, 5):
        time.sleep(0.6)
        progress.update(step, ["loss 1.5"])
"""


def test_a_notebook_shows_a_bar():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(NOTEBOOK)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs  # one display that was updated, not one for each step
    assert '<progress value="4" max="4"' in output["data"]["text/html"]
    assert "super&lt;b&gt;net: step 4 of 4 (100%), loss 1.5" in output["data"]["text/html"]


# The accuracy of the pool's best path after every epoch


def test_the_accuracy_changes_no_weight_and_no_path_and_is_counted(data, tmp_path):
    with new_run(tmp_path / "with", accuracy_images=10) as run:
        net, state = train(data, run=run, accuracy_images=10)
    with new_run(tmp_path / "without") as run:
        alone, plain = train(data, run=run)
    assert same_tensors(net.state_dict(), alone.state_dict())
    assert state.pool.state() == plain.pool.state()
    rows, others = rows_of(tmp_path / "with"), rows_of(tmp_path / "without")
    assert [row["loss"] for row in rows["step"]] == [row["loss"] for row in others["step"]]
    assert state.evaluation_images == plain.evaluation_images + 3 * 10
    assert [row["val_accuracy"] for row in others["epoch"]] == [None] * 3
    assert all(0 <= row["val_accuracy"] <= 1 for row in rows["epoch"])
    assert state.accuracy_of == "best path of the pool"
    log = (tmp_path / "with" / "log.txt").read_text()
    assert f"accuracy {rows['epoch'][0]['val_accuracy']:.1%}" in log


def test_without_a_pool_the_most_expensive_path_is_evaluated(data):
    _, state = train(data, sampler="uniform", accuracy_images=6)
    assert state.accuracy_of == "most expensive path"
    assert state.evaluation_images == 3 * 6


def test_the_accuracy_is_that_of_a_search(data):
    """Compare with an evaluation of the same path on all validation images."""
    from greedynas.greedy.settings import SearchSettings
    from greedynas.greedy.validation import evaluate_on_validation

    net, state = train(data, accuracy_images=len(data.val))
    (best, _) = state.pool.best(1)[0]
    settings = SearchSettings(bn="batch", bn_images=max(6, 10))
    result = evaluate_on_validation(net, [best], data, settings)
    assert state.accuracy == pytest.approx(float(result.accuracies[0]), abs=1 / len(data.val) + 1e-9)
