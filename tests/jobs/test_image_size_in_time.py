"""Tests of `--hours` with the preset `auto`, which takes smaller images where too few epochs would be left."""

from dataclasses import replace

import pytest
from rich.console import Console

from greedynas.jobs import resolving
from greedynas.jobs.auto_base import TOO_LARGE
from greedynas.jobs.resolving import settings_of
from greedynas.settings.loading import parse_assignments
from greedynas.stages.recipes import make_recipe
from tests.helpers.base_runs import NAME
from tests.helpers.pictures import paint
from tests.helpers.speed import PACE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("photographs"), {"a": 20, "b": 20, "c": 20}, size=(140, 130))


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """A machine on which everything takes ten times as long as usual with images of 126 pixels."""

    def pace(config, *_):
        factor = config.space.image_size**2 / 1_600
        slower = {key: factor * getattr(PACE, key) for key in ("step", "filtering", "evaluation", "retrain_step")}
        return replace(PACE, **slower, adapt_step=0.0 if config.pretrained is None else 0.1 * factor)

    monkeypatch.setattr(resolving, "known_pace", pace)


def in_time(source, hours, *assignments):
    changes = {"data.source": str(source), "data.workers": 0, **parse_assignments(["device=cpu", *assignments])}
    config, _ = settings_of("auto", changes, None, Console(), hours=hours)
    return config


@pytest.mark.parametrize(("space", "hours"), [("scratch=true", 0.15), (f"space=timm:{NAME}", 0.04)])
def test_a_shorter_time_takes_smaller_images(photographs, space, hours):
    plenty, little = in_time(photographs, 3, space), in_time(photographs, hours, space)
    assert little.space.image_size < plenty.space.image_size
    assert any(TOO_LARGE in reason for reason in little.reasons)
    assert not any(TOO_LARGE in reason for reason in plenty.reasons)
    assert little.space.sizes == tuple(size for size in plenty.space.sizes if size <= little.space.image_size)
    by_hand = in_time(photographs, hours, space, f"image_size={plenty.space.image_size}")
    assert by_hand.space.image_size == plenty.space.image_size
    epochs, fewer = (make_recipe(config.retrain).epochs for config in (little, by_hand))
    assert epochs > 1.3 * fewer


def test_images_are_no_smaller_than_the_time_asks_for(photographs):
    """The largest size that leaves half of the epochs is taken."""
    usual = make_recipe(in_time(photographs, 100, "scratch=true").retrain).epochs / 3
    sizes = []
    for hours in (0.1, 0.13, 0.16, 0.2, 0.6):
        config = in_time(photographs, hours, "scratch=true")
        sizes.append(config.space.image_size)
        larger = in_time(photographs, hours, "scratch=true", f"image_size={config.space.image_size + 16}")
        if any(TOO_LARGE in reason for reason in config.reasons):
            assert make_recipe(larger.retrain).epochs < 0.6 * usual
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 2
