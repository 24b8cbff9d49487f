"""How much a command prints: --quiet, --verbose, and lines where there is no terminal."""

import io
import json
import time

import pytest
import yaml

from greedynas.runtime.terminal import make_console
from tests.helpers.pictures import paint
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def command(tmp_path):
    photos = paint(tmp_path / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
    data = {"workers": 0, "val_images": 12, "test_images": 6}
    config = {"space": tiny_space().model_dump(mode="json"), "data": data, "train": SETTINGS}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    return ["train", tmp_path / "tiny.yaml", "--data", photos, "--out", tmp_path / "run"]


def test_quiet_prints_nothing_but_what_json_asks_for(run_cli, command):
    assert run_cli(*command, "--quiet") == (0, "", "")
    code, out, err = run_cli(*command, "--quiet", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["epochs"] == 3
    code, out, _ = run_cli(*command)  # the volume belongs to one command
    assert "Trained for 3 epochs" in out


def test_verbose_prints_the_log(run_cli, command):
    code, out, err = run_cli(*command, "--verbose")
    assert code == 0
    assert "epoch 2 of 3" in err
    assert "training on cpu" in err
    assert (out + err).count("no test image is an exact copy") == 1
    assert "Trained for 3 epochs" in out
    code, out, err = run_cli(*command, "--verbose", "--quiet")
    assert (code, out, err) == (2, "", "error: --quiet and --verbose exclude each other: give one of them\n")


def test_a_status_becomes_lines_where_there_is_no_terminal():
    console = make_console(file=io.StringIO(), line_seconds=0.05)
    with console.status("exporting <net>"):
        time.sleep(0.3)
    lines = console.file.getvalue().splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"exporting <net>: 0 s so far"}
    quiet = make_console(file=io.StringIO(), line_seconds=0.01, quiet=True)
    with quiet.status("exporting"):
        time.sleep(0.05)
    assert quiet.file.getvalue() == ""


def test_a_status_in_a_notebook_needs_no_widgets(recwarn):
    """A spinner left empty output there, and a warning if ipywidgets is not installed."""
    console = make_console(file=io.StringIO(), force_jupyter=True, line_seconds=10.0)
    with console.status("measuring"):
        time.sleep(0.3)
    assert console.file.getvalue() == ""
    assert not [one for one in recwarn if "ipywidgets" in str(one.message)]
