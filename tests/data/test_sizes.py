"""Tests of the same images at another input size, and of their normalisation."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from greedynas import load_space
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.data.transforms import normalisation
from greedynas.stages.testing import assess
from tests.helpers.base_runs import MEAN, NAME, STD
from tests.helpers.pictures import paint, same_batches

CPU = torch.device("cpu")
OWN = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """Pictures that are larger than the inputs and not square."""
    return paint(tmp_path_factory.mktemp("album"), {"a": 8, "b": 8}, size=(90, 70))


def at(source, size, normalised=None, **settings):
    settings = DataSettings(source=str(source), **{"workers": 0, "val_images": 4, "test_images": 4, **settings})
    return open_data(settings, image_size=size, image_channels=3, normalised=normalised, seed=3, device=CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"augment": "resized_crop"},
        {"memory_gb": 0},
        {"crop_fraction": 0.9},
        {"crop_fraction": 0.875},
        {"crop_fraction": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("size", "other"), [(40, 32), (72, 32), (32, 72)])
def test_another_size_is_what_opening_at_that_size_gives(album, size, other, settings):
    """From 64 px on, evaluation crops the centre unless `crop_fraction` says otherwise: both sides of it are compared."""
    here, there = at(album, size, **settings), at(album, other, **settings)
    moved = here.at_size(other)
    for one, expected in ((moved.train, there.train), (moved.val, there.val), (moved.test(), there.test())):
        images, labels = one.eval_batch()
        wanted, wanted_labels = expected.eval_batch()
        assert images.shape[2:] == (other, other)
        assert torch.equal(labels, wanted_labels)
        assert torch.equal(images, wanted)
    assert same_batches(moved.train.train_batches(1, 4), there.train.train_batches(1, 4))
    assert same_batches(moved.train_and_val().train_batches(0, 6), there.train_and_val().train_batches(0, 6))
    assert moved.identity() == here.identity() == there.identity()
    assert here.train.view.size == size  # as before


def test_the_same_size_opens_nothing(album):
    data = at(album, 32)
    assert data.at_size(32) is data


def test_a_view_normalises_by_its_own_mean_and_deviation(album):
    own, usual = at(album, 32, (OWN["mean"], OWN["std"])), at(album, 32)
    assert own.train.view.normalisation == (OWN["mean"], OWN["std"])
    assert usual.train.view.normalisation == normalisation(3)
    values, imagenet = own.train.eval_batch()[0].double(), usual.train.eval_batch()[0].double()
    for channel in range(3):
        pixels = values[:, channel] * OWN["std"][channel] + OWN["mean"][channel]
        mean, std = (part[channel] for part in normalisation(3))
        assert torch.allclose(pixels, imagenet[:, channel] * std + mean, atol=1e-6)
        assert -1e-6 < float(pixels.min()) < 0.3 < 0.7 < float(pixels.max()) < 1 + 1e-6
    assert torch.equal(own.train.view.pixels(values.float()), usual.train.view.pixels(imagenet.float()))


def test_training_batches_and_other_sizes_are_normalised_alike(album):
    for data in (own := at(album, 32, (OWN["mean"], OWN["std"]), augment="none", flip=False), own.at_size(40)):
        plain = data.train.eval_batch()[0]
        (batch, _), *_ = data.train.train_batches(0, len(data.train))
        assert torch.equal(batch.sum((1, 2, 3)).sort().values, plain.sum((1, 2, 3)).sort().values)


def test_a_space_around_a_base_brings_the_numbers_of_its_base(album):
    space = load_space(f"timm:{NAME}")
    settings = DataSettings(source=str(album), workers=0, val_images=4, test_images=4)
    assert (space.mean, space.std) == (MEAN, STD)
    assert open_data(settings, space=space, device=CPU).train.view.normalisation == (MEAN, STD)
    assert open_data(settings, space=load_space("pocket"), device=CPU).val.view.normalisation == normalisation(3)


class Guess(nn.Module):
    def forward(self, images):
        return images.mean((2, 3))[:, :2]


def test_shown_test_images_have_the_colours_of_their_files(tmp_path):
    """A thumbnail is made from the network's input, which must be scaled back by the view's own numbers."""
    colours = {"green": (20, 200, 40), "purple": (150, 30, 220)}
    for name, colour in colours.items():
        (tmp_path / name).mkdir()
        for number in range(8):
            colour = (colour[0] + number, *colour[1:])
            Image.new("RGB", (40, 36), colour).save(tmp_path / name / f"{number}.png")
    data = at(tmp_path, 32, (OWN["mean"], OWN["std"]), check_duplicates=False)
    for test in (data.test(), data.at_size(24).test()):
        shown = assess(Guess(), test, data.class_names, seed=0)["samples"]
        assert len(shown) == 4
        for sample in shown:
            with Image.open(io.BytesIO(base64.b64decode(sample["image"].partition(",")[2]))) as image:
                pixels = np.asarray(image).reshape(-1, 3).astype(int)
            expected = np.array(colours[data.class_names[sample["label"]]])
            difference = pixels - expected
            assert (difference[:, 0] >= 0).all()  # red grows with the number of the file
            assert (difference[:, 0] <= 36).all()
            assert (abs(difference[:, 1:]) <= 1).all()
