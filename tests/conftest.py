import logging
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as cli.py does, before torch is loaded

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quick")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; the tests of signals need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def synthetic_truth(tmp_path_factory) -> Path:
    """A made-up ground truth in the form of NAS-Bench-Macro's file: for tests of what the package does with it."""
    from tests.helpers.synthetic_files import write_truth

    return write_truth(tmp_path_factory.mktemp("truth") / "nas-bench-macro_cifar10.json")


@pytest.fixture(scope="session")
def macro_truth() -> Path:
    """The published ground truth of NAS-Bench-Macro, which lies beside the checkout and is not part of it.

    Only tests of its own numbers may need it: without the file they are skipped.
    """
    file = SHARED / "nas-bench-macro_cifar10.json"
    if not file.exists():
        pytest.skip("NAS-Bench-Macro's ground truth is not beside this checkout")
    return file


@pytest.fixture(scope="module")
def browser():
    """Return a headless Chromium."""
    from tests.helpers.web_page import installed_browser

    program = installed_browser()
    if program is None:
        pytest.skip("no Chromium or Chrome is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Call the command line in this process: (exit code, stdout, stderr)."""
    from greedynas.cli import main as cli

    handlers = logging.getLogger("greedynas").handlers

    def call(*arguments):
        before = list(handlers)
        monkeypatch.setattr(sys, "argv", ["greedynas", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        handlers[:] = before  # a process has one command line, this one has many
        return stop.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def one_thread():
    """Threads cost more than they bring with networks as small as those of `tests.helpers.training`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """60 little pictures of three classes: 42 to train on, 12 for validation, 6 for a test."""
    from tests.helpers.pictures import paint

    return paint(tmp_path_factory.mktemp("photos"), {"a": 20, "b": 20, "c": 20}, size=(10, 9))


@pytest.fixture(scope="session")
def data(photos):
    from tests.helpers.training import opened

    found = opened(photos)
    assert (len(found.train), len(found.val)) == (42, 12)  # four steps an epoch, two images left out
    return found


@pytest.fixture
def registered(monkeypatch):
    """Registers something for one test."""

    def register(registry, name, implementation):
        monkeypatch.setattr(registry, "_found", dict(registry._found))
        return registry.register(name, implementation)

    return register


@pytest.fixture(scope="session")
def exported(photos, tmp_path_factory):
    """An exported run; tests leave it as it is."""
    from greedynas.stages.export import export_stage
    from tests.helpers.exports import QUIET, make_run

    folder = make_run(tmp_path_factory.mktemp("exported"), photos)
    export_stage(folder, QUIET)
    return folder


@pytest.fixture(scope="session")
def base_job(tmp_path_factory):
    """The settings and the folder of a finished job around a pretrained network; tests leave both as they are."""
    from greedynas.jobs.job import run_job
    from greedynas.jobs.resolving import load_config
    from tests.helpers.base_runs import LIMITS, write_job
    from tests.helpers.exports import QUIET

    folder = tmp_path_factory.mktemp("base-job")
    file, threads = write_job(folder), torch.get_num_threads()
    torch.set_num_threads(1)
    run_job(load_config(file), folder / "run", LIMITS, QUIET, with_random=True)
    torch.set_num_threads(threads)
    return file, folder / "run"
