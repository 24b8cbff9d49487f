import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greedynas.data import loader
from greedynas.data.transforms import ATTEMPTS, crop_boxes
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream, uniforms
from tests.helpers.pictures import opened, paint, pixels, same_batches, spoil


def test_the_order_is_reproducible_and_can_be_resumed():
    data = opened(val_images=7900)  # 100 training images
    order = stream(0, "order", 3).permutation(100)
    batches = list(data.train.train_batches(3, 32))
    assert len(batches) == data.train.steps_per_epoch(32) == 3  # the last four images are dropped
    assert torch.cat([labels for _, labels in batches]).tolist() == data.train.labels[order[:96]].tolist()
    for start in range(5):
        rest = list(data.train.train_batches(3, 32, start))
        assert len(rest) == max(0, 3 - start)
        for (images, labels), (expected, expected_labels) in zip(rest, batches[start:], strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)
    (images, labels), *others = data.train.train_batches(0, 1000)
    assert not others
    assert images.shape == (100, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


def by_hand(image, numbers, augment, size, pad=3, min_scale=0.2):
    """Return the augmentation of one image, computed slowly: 0..255 (size, size, channels)."""
    if augment == "pad_crop":
        padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0))).astype(np.float64)
        top, left = (int(number * (len(padded) - size + 1)) for number in numbers[:2])
        cropped = padded[top : top + size, left : left + size]
        return cropped[:, ::-1] if numbers[2] < 0.5 else cropped
    for area, shape in zip(numbers[:ATTEMPTS], numbers[ATTEMPTS:], strict=False):
        aspect = np.exp(np.log(3 / 4) + shape * 2 * np.log(4 / 3))
        area = (min_scale + (1 - min_scale) * area) * image.shape[0] * image.shape[1]
        width, height = np.sqrt(area * aspect), np.sqrt(area / aspect)
        if width <= image.shape[1] and height <= image.shape[0]:
            break
    else:
        raise AssertionError("an image like this one always has a crop that fits")
    left = numbers[2 * ATTEMPTS] * (image.shape[1] - width)
    top = numbers[2 * ATTEMPTS + 1] * (image.shape[0] - height)
    across, down = (triangles(*box, size) for box in ((left, width, image.shape[1]), (top, height, image.shape[0])))
    out = np.einsum("ih,hwc,jw->ijc", down, image.astype(np.float64), across)
    return out[:, ::-1] if numbers[-1] < 0.5 else out


def triangles(start, length, pixels, size):
    """Return the weights of antialiased bilinear resampling along an axis: (size of the crop, pixels of the image)."""
    weights = np.zeros((size, pixels))
    scale = length / size
    for i in range(size):
        for j in range(pixels):
            distance = abs(j + 0.5 - (start + (i + 0.5) * scale)) / max(scale, 1)
            weights[i, j] = max(0, 1 - distance)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("crop_fraction", [1.0, 0.75])
@pytest.mark.parametrize("augment", ["pad_crop", "resized_crop"])
def test_augmentation_of_a_batch_equals_that_of_single_images(tmp_path, augment, crop_fraction):
    paint(tmp_path, {"a": 12, "b": 12}, size=(20, 16) if augment == "resized_crop" else (16, 16))
    data = opened(tmp_path, 12, 3, augment=augment, crop_fraction=crop_fraction, pad=3, min_scale=0.2)
    if augment == "resized_crop":  # crops of the whole image, which is not larger than the kept one
        source, rows = data.train._shelf.source, data.train._shelf.rows[data.train._rows]
        images = np.stack([np.asarray(source.image(row)) for row in rows])
    else:
        images = pixels(opened(tmp_path, round(12 / crop_fraction), 3).train.eval_batch()[0]).round().numpy()
    order = stream(0, "order", 5).permutation(len(data.train))
    batches = torch.cat([images for images, _ in data.train.train_batches(5, 4)])
    assert len(batches) == 16
    count = {"pad_crop": 3, "resized_crop": 2 * ATTEMPTS + 3}[augment]
    for sample, image in zip(order, pixels(batches), strict=False):
        numbers = uniforms(0, "augment", 5, np.array([sample]), count)[0]
        rounded = 1.01 if augment == "resized_crop" else 0.01  # Pillow rounds after each of two passes
        np.testing.assert_allclose(image, by_hand(images[sample], numbers, augment, 12), atol=rounded)


@pytest.mark.parametrize("augment", ["none", "pad_crop", "resized_crop"])
def test_augmentation_depends_only_on_epoch_and_sample(augment):
    def by_sample(epoch, batch_size, **settings):
        data = opened(val_images=7900, augment=augment, **settings)
        order = stream(0, "order", epoch).permutation(100)
        images = torch.cat([images for images, _ in data.train.train_batches(epoch, batch_size)])
        return images[np.argsort(order)], data.train.eval_batch()[0]

    one, plain = by_sample(0, 10)
    assert torch.equal(one, by_sample(0, 50)[0])
    other, unflipped = by_sample(1, 10)[0], by_sample(0, 10, flip=False)[0]
    if augment == "none":
        assert torch.equal(one, plain)
        assert torch.equal(other, plain)
        return
    assert not torch.equal(one, other)
    same, flipped = ((one - reference).abs().amax((1, 2, 3)) < 1e-4 for reference in (unflipped, unflipped.flip(3)))
    assert (same | flipped).all()
    assert 30 <= flipped.sum() <= 70


@given(st.integers(0, 2**32), st.floats(0.05, 20), st.floats(0.05, 1))
def test_crops_lie_within_the_image(seed, aspect, min_scale):
    x, y, w, h = crop_boxes(np.random.default_rng(seed).random((50, 22)), np.full(50, aspect), min_scale).T
    assert (np.minimum(x, y) >= 0).all()
    assert (np.maximum(x + w, y + h) <= 1 + 1e-12).all()
    shape = w * aspect / h
    assert ((shape >= 3 / 4 - 1e-9) & (shape <= 4 / 3 + 1e-9)).all()
    centred = np.isclose(x, (1 - w) / 2) & np.isclose(y, (1 - h) / 2) & np.isclose(np.maximum(w, h), 1)
    assert ((w * h >= min_scale - 1e-9) | centred).all()


def test_crops_are_distributed_like_torchvisions():
    from scipy import stats
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.empty(1, 600, 900)
    theirs = np.array([RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(3000)])
    ours = crop_boxes(np.random.default_rng(0).random((3000, 22)), np.full(3000, 1.5), 0.08)
    ours = ours[:, [1, 0, 3, 2]] * [600, 900, 600, 900]
    for mine, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(mine.round(), other).pvalue > 0.001


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("augment", ["pad_crop", "resized_crop"])
def test_streaming_does_not_depend_on_the_workers(tmp_path, augment):
    paint(tmp_path, {"a": 20, "b": 30}, size=(20, 13))
    spoil(tmp_path / "a" / "7.png")
    before = torch.get_rng_state()
    sets = [opened(tmp_path, 8, 3, augment=augment, memory_gb=0, workers=workers).train for workers in (0, 1, 3)]
    assert not sets[0].in_memory
    expected = list(sets[0].train_batches(2, 8))
    assert len(expected) == 4
    assert expected[0][0].is_contiguous(memory_format=torch.channels_last)
    assert same_batches(sets[1].train_batches(2, 8), expected)
    assert same_batches(sets[2].train_batches(2, 8), expected)
    assert same_batches(sets[2].train_batches(2, 8, start=1), expected[1:])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("augment", ["none", "pad_crop", "resized_crop"])
def test_streaming_gives_the_same_batches_as_memory(tmp_path, augment):
    paint(tmp_path, {"a": 20, "b": 30}, size=(20, 13))
    memory, disk = (opened(tmp_path, 8, 3, memory_gb=limit, crop_fraction=0.8, augment=augment) for limit in (1, 0))
    assert memory.train.in_memory
    assert not disk.train.in_memory
    assert same_batches(memory.train.train_batches(1, 8), disk.train.train_batches(1, 8))
    assert same_batches(memory.train_and_val().train_batches(1, 8), disk.train_and_val().train_batches(1, 8))
    for indices in (None, [4, 0, 3], np.array([2, 2]), []):
        assert same_batches([memory.val.eval_batch(indices)], [disk.val.eval_batch(indices)])
        assert same_batches([memory.test().eval_batch(indices)], [disk.test().eval_batch(indices)])


def test_a_small_validation_set_stays_in_memory_beside_a_stream(tmp_path):
    paint(tmp_path, {"a": 20, "b": 30})
    data = opened(tmp_path, 8, 3, memory_gb=12 * 8 * 8 * 3 / 1e9)
    assert not data.train.in_memory
    assert data.val.in_memory
    assert any("streaming" in note for note in data.notes)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_in_a_stream_are_replaced_or_refused(tmp_path, caplog, workers):
    paint(tmp_path, {"a": 10, "b": 10})
    data = opened(tmp_path, 8, 3, memory_gb=0, workers=workers, augment="none")
    good = data.train.eval_batch()[0]
    first, second = (data.train._shelf.source.path(data.train._rows[i]) for i in (3, 4))
    spoil(first)
    spoil(second, "text")
    with caplog.at_level(logging.WARNING, "greedynas"):
        order = stream(0, "order", 0).permutation(len(data.train))
        for _ in range(2):
            images, labels = next(data.train.train_batches(0, 50))
            replaced = np.where(np.isin(order, [3, 4]), 5, order)
            assert torch.equal(images, good[replaced])
            assert torch.equal(labels, data.train.labels[replaced])
        assert torch.equal(data.train.eval_batch([2, 3])[0], good[[2, 5]])
    assert len(caplog.records) == 2  # each named once
    assert str(first) in caplog.text
    assert f"{second}: no image in a known format" in caplog.text
    strict = opened(tmp_path, 8, 3, memory_gb=0, workers=workers, unreadable="refuse")
    with pytest.raises(GreedyNASError, match=r"cannot read .*png: ") as error:
        list(strict.train.train_batches(0, 50))
    assert "\n" not in str(error.value)
    for file in tmp_path.glob("*/*.png"):
        spoil(file, "empty")
    with pytest.raises(GreedyNASError, match="none of the images can be read"):
        list(data.train.train_batches(0, 4))


def test_many_files_are_decoded_by_workers(tmp_path, monkeypatch):
    paint(tmp_path, {"a": 20, "b": 30})
    spoil(tmp_path / "b" / "4.png")
    here = opened(tmp_path, 8, 3)
    monkeypatch.setattr(loader, "FEW", 10)
    monkeypatch.setattr(loader, "CHUNK", 7)
    there = opened(tmp_path, 8, 3, workers=2)
    assert same_batches([there.train_and_val().eval_batch()], [here.train_and_val().eval_batch()])
    assert there.notes == here.notes
