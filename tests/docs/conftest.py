"""A folder with images and a finished run, in which the code of README, docs and docstrings runs at a small size."""

import functools
import shutil
from pathlib import Path

import pytest
import torch

import greedynas
from tests.helpers.pictures import paint, picture

SPACE = greedynas.Space(
    name="tiny",
    ops=["ID", "MB2_K3", "MB3_K3_SE"],
    stem=[greedynas.Fixed(op="CONV_K3", channels=8, stride=2)],
    stages=[greedynas.Stage(channels=8, repeat=2), greedynas.Stage(channels=12, repeat=2, stride=2)],
    head=[greedynas.Fixed(op="CONV_K1", channels=16)],
    image_size=16,
    num_classes=3,
)
SMALL = {
    "space": "tiny.yaml",
    "image_size": 16,
    "device": "cpu",
    "data.workers": 0,
    "train.m": 4,
    "train.k": 2,
    "train.pool_size": 4,
    "train.max_epochs": 2,
    "search.population": 8,
    "search.generations": 2,
    "retrain.epochs": 2,
}


def smaller(function):
    """Wrap a stage of the public API so that it trains less and prints nothing."""

    @functools.wraps(function)
    def call(settings, out, **arguments):
        if not isinstance(settings, greedynas.Config):
            given = dict(arguments.pop("changes", None) or {})
            own = {} if "space" not in given else {"space": given.pop("space")}
            if own and isinstance(own["space"], greedynas.Space):
                Path("own.yaml").write_text(own["space"].to_yaml())
                own = {"space": "own.yaml"}
            arguments["changes"] = {**SMALL, **given, **own}
        return function(settings, out, **{**arguments, "quiet": True})

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Make a folder with `photos/`, a space and `runs/photos`, by the call in the README."""
    folder = tmp_path_factory.mktemp("documented")
    paint(folder / "photos", {"cat": 20, "dog": 20, "owl": 20}, size=(40, 36))
    picture(7, (40, 36)).save(folder / "holiday.jpg")
    (folder / "tiny.yaml").write_text(SPACE.to_yaml())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        smaller(greedynas.run)("auto", "runs/photos", data="photos/", flops="5M")
    return folder


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """Change to a copy of that folder, with a public API that trains less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("run", "train"):
        monkeypatch.setattr(greedynas, name, smaller(getattr(greedynas, name)))
    yield tmp_path
    torch.set_num_threads(threads)
