"""timm's augmentation with the streams of greedynas: the result depends only on (seed, epoch, sample)."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from greedynas import GreedyNASError
from greedynas.data.augmentation import augment_more, check_randaugment, lent_generators, make_mixup, seeded_generators
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.data.transforms import View
from tests.helpers.pictures import paint

VIEW = View(12, 12, 3, "none", 0, 0.5, False, seed=5)


def opened(source, channels=3, **settings):
    settings = DataSettings(source=str(source), **{"val_images": 6, "test_images": 6, "workers": 0, **settings})
    return open_data(settings, image_size=12, image_channels=channels, seed=0, device=torch.device("cpu")).train


def pictures(n, channels=3, size=12):
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (n, size, size, channels), dtype=np.uint8))


def global_state():
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # noqa: NPY002


def drawn():
    return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002


def epoch_of(images, epoch=3, batch=7):
    return torch.cat([batch for batch, _ in images.train_batches(epoch, batch)])


# Global generators


def test_generators_are_seeded_and_restored():
    before = global_state()
    with seeded_generators(1, "purpose", 2, 3):
        first = drawn()
    assert global_state() == before
    with seeded_generators(1, "purpose", 2, 3):
        assert drawn() == first
    for other in ((2, "purpose", 2, 3), (1, "porpoise", 2, 3), (1, "purpose", 2, 4)):
        with seeded_generators(*other):
            assert all(a != b for a, b in zip(drawn(), first, strict=True))
    with pytest.raises(ZeroDivisionError):
        fail_with_lent_generators()
    assert global_state() == before


def fail_with_lent_generators():
    with lent_generators() as reseed:
        reseed(7)
        raise ZeroDivisionError


# Single images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "changes", [{"randaugment": "rand-m9-n3-mstd0.5"}, {"erasing": 0.7}], ids=["randaugment", "erasing"]
)
def test_an_image_does_not_depend_on_its_batch(channels, changes):
    view = replace(VIEW, channels=channels, **changes)
    images, samples = pictures(40, channels), np.arange(100, 140)
    before, global_before = images.clone(), global_state()
    together = augment_more(view, images, 3, samples)
    assert (together.shape, together.dtype) == (images.shape, torch.uint8)
    assert torch.equal(images, before)
    assert global_state() == global_before
    order = np.random.default_rng(0).permutation(40)
    alone = torch.cat([augment_more(view, images[[i]], 3, samples[[i]]) for i in order])
    assert torch.equal(together[order], alone)
    changed = (together != images).flatten(1).any(1)
    assert 15 < changed.sum() <= 40
    for other in (augment_more(view, images, 4, samples), augment_more(replace(view, seed=6), images, 3, samples)):
        assert (other != together).flatten(1).any(1).sum() > 10


@pytest.mark.parametrize(
    "text", ["rand-m9-mstd0.5", "rand-m7-n4-inc1", "rand-m5-n9-p1-tweights", "rand-n9-p1-t3aw", "rand"]
)
def test_grey_images_take_every_operation(text):
    view = replace(VIEW, channels=1, randaugment=text)
    augmented = augment_more(view, pictures(60, 1), 0, np.arange(60))
    assert augmented.shape == (60, 12, 12, 1)
    assert (augmented != pictures(60, 1)).any()


def test_areas_moved_in_have_the_mean_colour():
    view = replace(VIEW, randaugment="rand-m10-n9-p1")
    black = torch.zeros(30, 12, 12, 3, dtype=torch.uint8)
    colours = augment_more(view, black, 0, np.arange(30)).reshape(-1, 3).tolist()
    assert [124, 116, 104] in colours


def test_erasing_leaves_the_rest_of_the_image_unchanged():
    images = pictures(400)
    erased = augment_more(replace(VIEW, erasing=0.5), images, 0, np.arange(400))
    changed = (erased != images).any(3)
    assert 150 < changed.flatten(1).any(1).sum() < 250
    for mask in changed[changed.flatten(1).any(1)]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert mask.sum() >= 0.9 * box  # a rectangle, except where the noise happens to equal the pixel
        assert box <= 0.45 * 144


def test_denormalising_restores_pixels_exactly():
    every = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(256, 12, 12, 3)
    assert torch.equal(VIEW.pixels(VIEW.normalise(every)), every)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("augment", ["pad_crop", "resized_crop"])
def test_workers_do_not_change_images(tmp_path, augment, monkeypatch):
    from greedynas.data import loader

    monkeypatch.setattr(loader, "FEW", 5)
    paint(tmp_path, {"a": 20, "b": 20}, size=(12, 12))
    more = {"randaugment": "rand-m9-mstd0.5", "erasing": 0.5}
    sets = {
        (where, workers): opened(tmp_path, augment=augment, workers=workers, memory_gb=gb).seen(**more)
        for where, gb in (("memory", None), ("stream", 0))
        for workers in (0, 2)
    }
    found = {key: epoch_of(images) for key, images in sets.items()}
    assert [images.in_memory for images in sets.values()] == [True, True, False, False]
    assert torch.equal(found["memory", 0], found["memory", 2])
    assert torch.equal(found["stream", 0], found["stream", 2])
    assert torch.equal(found["memory", 0], found["stream", 0])
    images = sets["memory", 0]
    assert torch.equal(found["memory", 0][14:], epoch_of_from(images, start=2))
    assert not torch.equal(found["memory", 0], epoch_of(images, epoch=4))


def epoch_of_from(images, start):
    return torch.cat([batch for batch, _ in images.train_batches(3, 7, start=start)])


def test_another_view_does_not_change_the_set(tmp_path):
    paint(tmp_path, {"a": 20, "b": 20}, size=(12, 12))
    images = opened(tmp_path)
    before = epoch_of(images)
    other = images.seen(randaugment="rand-m9", seed=8)
    assert not torch.equal(epoch_of(other), before)
    assert torch.equal(epoch_of(images), before)
    assert torch.equal(other.eval_batch()[0], images.eval_batch()[0])  # evaluation is never augmented


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5", "rand", "rand-m9-n3-p0.3-mstd101-mmax20-inc1-tweights"])
def test_timms_notation_is_accepted(text):
    check_randaugment(text)


@pytest.mark.parametrize("text", ["", "augmix-m3", "rand-", "rand-m", "rand-x9", "rand-m9-tfoo", "rand-n0", "rand-p7"])
def test_other_notations_are_refused(text):
    with pytest.raises(GreedyNASError, match=r"is not in timm's notation, such as rand-m9-mstd0\.5"):
        check_randaugment(text)


# Batches


def batch(n=10, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % classes


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_mixing_depends_only_on_epoch_and_batch(mixup, cutmix):
    mix = make_mixup(mixup, cutmix, 4, seed=3)
    before = global_state()
    images, targets = mix(*batch(), 2, 5)
    assert global_state() == before
    again, same = mix(*batch(), 2, 5)
    assert torch.equal(images, again)
    assert torch.equal(targets, same)
    assert not torch.equal(images, mix(*batch(), 2, 6)[0])
    assert not torch.equal(images, mix(*batch(), 3, 5)[0])
    assert not torch.equal(images, make_mixup(mixup, cutmix, 4, seed=4)(*batch(), 2, 5)[0])


def test_mixup_is_a_convex_combination_of_pairs_and_of_their_labels():
    mix, (images, labels) = make_mixup(0.8, 0.0, 4, seed=0), batch()
    mixed, targets = mix(images.clone(), labels, 0, 0)
    share = float(targets[0, labels[0]])
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * images + (1 - share) * images.flip(0))
    hot = torch.nn.functional.one_hot(labels, 4)
    torch.testing.assert_close(targets, share * hot + (1 - share) * hot.flip(0))


def test_cutmix_labels_follow_the_area():
    mix, (images, labels) = make_mixup(0.0, 1.0, 4, seed=0), batch()
    mixed, targets = mix(images.clone(), labels, 0, 1)
    kept = (mixed == images).all(1).float().mean((1, 2))
    torch.testing.assert_close(targets[0, labels[0]], kept[0])
    assert 0 < kept[0] < 1
    assert ((mixed == images) | (mixed == images.flip(0))).all()


def test_no_mixing_and_odd_batches():
    assert make_mixup(0, 0, 4, seed=0) is None
    images, targets = make_mixup(0.2, 0, 4, seed=0)(*batch(9), 0, 0)
    assert (len(images), targets.shape) == (8, (8, 4))
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
