import contextlib
import gzip
import io
import logging
import pickle
import runpy
import struct
import sys
import tarfile
import zlib
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from greedynas import imagesets
from greedynas.data import DataSettings, hold_out, macro_accuracy, normalisation, open_data
from greedynas.errors import GreedyNASError
from greedynas.images import ATTEMPTS, Unreadable, View, crop_boxes, random_crop, square, to_channels
from greedynas.reading import FASHION, _from_torchvision
from greedynas.sources import Files
from greedynas.streams import stream, uniforms

CPU = torch.device("cpu")


def opened(source="fashion", size=28, channels=1, seed=0, **settings):
    settings = DataSettings(source=str(source), **{"workers": 0, **settings})
    return open_data(settings, image_size=size, image_channels=channels, seed=seed, device=CPU)


def picture(seed, size=(12, 10), mode="RGB"):
    """A smooth random picture: neighbours are alike, as in photographs."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC).convert(mode)


def paint(folder, counts, first=0, size=(12, 10)):
    """An image folder: so many different pictures of each class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture([first, zlib.crc32(name.encode()), i], size).save(folder / name / f"{i}.png")
    return folder


def pixels(batch, channels=3):
    """Normalised images back to 0..255, (n, size, size, channels)."""
    mean, std = (torch.tensor(values)[:, None, None] for values in normalisation(channels))
    return ((batch * std + mean) * 255).permute(0, 2, 3, 1)


def spoil(file, how="truncated"):
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "text": b"not an image"}[how])


# The embedded sample


def test_the_embedded_sample():
    assert FASHION.stat().st_size < 5_000_000
    assert "2017, Zalando SE" in FASHION.with_name("fashion.LICENSE.txt").read_text()
    data = opened(val_images=2000)
    assert [len(data.train), len(data.val), len(data.test()), len(data.train_and_val())] == [6000, 2000, 2000, 8000]
    assert data.class_names[0] == "T-shirt/top"
    assert data.class_names[-1] == "Ankle boot"
    for images, count in ((data.train, 600), (data.val, 200), (data.test(), 200)):
        assert images.in_memory
        assert torch.bincount(images.labels).tolist() == [count] * 10
    with np.load(FASHION, allow_pickle=False) as arrays:
        images, labels = data.test().eval_batch()
        assert (pixels(images, 1)[..., 0].round().numpy() == arrays["test_images"]).all()
        assert (labels.numpy() == arrays["test_labels"]).all()
        whole, _ = data.train_and_val().eval_batch()
        assert (pixels(whole, 1)[..., 0].round().numpy() == arrays["train_images"]).all()
    assert any("no test image is an exact copy" in note for note in data.notes)


def test_normalisation_is_timms():
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    assert normalisation(3) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert normalisation(1) == (pytest.approx((0.449,)), pytest.approx((0.226,)))
    with pytest.raises(GreedyNASError, match=r"1 .* or 3 .* channels, not 4"):
        normalisation(4)


# Splits


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"train": 10, "test": 4}, (18, 2, 8)),
        ({"training": 10, "valid": 4}, (18, 2, 8)),  # the only other one is the test set
        ({"Train": 10, "val": 3, "test": 4}, (20, 6, 8)),
        ({"": 10}, (14, 2, 4)),
    ],
)
def test_the_forms_of_a_folder(tmp_path, folders, expected):
    for i, (name, count) in enumerate(folders.items()):
        paint(tmp_path / name, {"cat": count, "dog": count}, first=i)
    data = opened(tmp_path, 8, 3)
    assert (len(data.train), len(data.val), len(data.test())) == expected
    assert data.class_names == ["cat", "dog"]
    held_out = not {"val", "test"} < set(folders)
    assert len(data.train_and_val()) == len(data.train) + held_out * len(data.val)
    seen = [
        picture.numpy().tobytes()
        for images in (data.train, data.val, data.test())
        for picture in images.eval_batch()[0]
    ]
    assert len(set(seen)) == len(seen) == sum(expected)


def test_classes_may_be_called_train_and_have_numbers_and_subfolders(tmp_path):
    paint(tmp_path, {"train": 8, "bus 10/front": 4, "bus 10/back": 4, "bus 9": 8, ".hidden": 3})
    picture(0).save(tmp_path / "stray.png")
    data = opened(tmp_path, 8, 3, val_images=3)
    assert data.class_names == ["bus 9", "bus 10", "train"]
    assert len(data.train) + len(data.val) + len(data.test()) == 24
    assert any("stray.png" in note for note in data.notes)


def test_splits_depend_on_the_seed_alone(tmp_path):
    paint(tmp_path, {"a": 20, "b": 30})

    def test_images(seed, **settings):
        return opened(tmp_path, 8, 3, seed=seed, **settings).test().eval_batch()[0]

    assert torch.equal(test_images(1), test_images(1, val_images=20))
    assert not torch.equal(test_images(1), test_images(2))


@pytest.mark.parametrize("own_val", [False, True])
def test_another_seed_needs_no_decoding(tmp_path, own_val):
    for split, count in (("train", 12), ("test", 3), *([("val", 4)] if own_val else [])):
        paint(tmp_path / split, {"a": count, "b": count}, first=count)
    settings = DataSettings(source=str(tmp_path), workers=0, val_images=6, class_weights="balanced")
    fresh, kept = (open_data(settings, image_size=8, image_channels=3, seed=seed, device=CPU) for seed in (7, 3))
    kept.test()
    anew = kept.split_anew(settings, 7)
    assert anew.identity() == fresh.identity()
    assert anew.notes[0] == fresh.notes[0]
    for ours, theirs in ((anew.train, fresh.train), (anew.val, fresh.val), (anew.test(), fresh.test())):
        for mine, other in zip(ours.train_batches(2, 4), theirs.train_batches(2, 4), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert torch.equal(ours.eval_batch()[0], theirs.eval_batch()[0])
    assert torch.equal(anew.class_weights, fresh.class_weights)


def test_another_seed_holds_out_another_test_set(tmp_path):
    paint(tmp_path, {"a": 12, "b": 12})
    settings = DataSettings(source=str(tmp_path), workers=0, val_images=6)
    assert opened(tmp_path, 8, 3, seed=3, val_images=6).split_anew(settings, 7) is None


@given(st.lists(st.integers(3, 60), min_size=2, max_size=8), st.data(), st.integers(0, 10))
def test_hold_out_is_stratified(counts, data, seed):
    counts = np.array(counts)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    names = [str(i) for i in range(len(counts))]
    test = data.draw(st.integers(len(counts), counts.sum() - 2 * len(counts)))
    val = data.draw(st.integers(len(counts), counts.sum() - test - len(counts)))
    rows = hold_out(labels, names, {"test": test, "val": val}, np.random.default_rng(seed))
    assert [len(rows[part]) for part in ("test", "val")] == [test, val]
    assert sorted(np.concatenate(list(rows.values()))) == list(range(len(labels)))
    for part in rows.values():
        assert (np.diff(part) > 0).all()
        assert (np.bincount(labels[part], minlength=len(counts)) >= 1).all()
    quota = test * counts / counts.sum()
    if (np.floor(quota) >= 1).all() and (np.ceil(quota) <= counts - 2).all():
        assert (np.abs(np.bincount(labels[rows["test"]]) - quota) < 1).all()


def test_fractions_count_all_images():
    labels = np.repeat([0, 1], [60, 40])
    rows = hold_out(labels, ["a", "b"], {"test": 0.2, "val": 0.1}, np.random.default_rng(0))
    assert {part: np.bincount(labels[own]).tolist() for part, own in rows.items()} == {
        "test": [12, 8],
        "val": [6, 4],
        "train": [42, 28],
    }


@pytest.mark.parametrize(
    ("counts", "wanted", "message"),
    [
        ((5, 1), {"val": 2}, "class 'b' has too few images .1.: at least 2"),
        ((5, 2), {"test": 2, "val": 2}, "at least 3 are needed, one each for test, val and train"),
        ((50, 50), {"val": 1}, "val_images = 1 .* set it to at least 2"),
        ((50, 50), {"val": 0.01}, "val_images = 0.01 of 100 images is 1, fewer than the 2 classes"),
        ((50, 50), {"val": 99}, "needs 99 images, but of 100 at most 98"),
        ((50, 50), {"test": 60, "val": 39}, "val_images = 39 needs 39 images, but of 100 at most 38"),
    ],
)
def test_impossible_splits_are_refused(counts, wanted, message):
    with pytest.raises(GreedyNASError, match=message):
        hold_out(np.repeat([0, 1], counts), ["a", "b"], wanted, np.random.default_rng(0))


# Batches


def test_the_order_is_ours_and_can_be_resumed():
    data = opened(val_images=7900)  # 100 training images
    order = stream(0, "order", 3).permutation(100)
    batches = list(data.train.train_batches(3, 32))
    assert len(batches) == data.train.steps_per_epoch(32) == 3  # the last four images are left out
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


def by_hand(square, numbers, augment, size, pad=3, min_scale=0.2):
    """What happens to one image, slowly: 0..255 (size, size, channels)."""
    if augment == "pad_crop":
        padded = np.pad(square, ((pad, pad), (pad, pad), (0, 0))).astype(np.float64)
        top, left = (int(number * (len(padded) - size + 1)) for number in numbers[:2])
        cropped = padded[top : top + size, left : left + size]
        return cropped[:, ::-1] if numbers[2] < 0.5 else cropped
    for area, shape in zip(numbers[:ATTEMPTS], numbers[ATTEMPTS:], strict=False):
        aspect = np.exp(np.log(3 / 4) + shape * 2 * np.log(4 / 3))
        area = (min_scale + (1 - min_scale) * area) * len(square) ** 2
        width, height = np.sqrt(area * aspect), np.sqrt(area / aspect)
        if max(width, height) <= len(square):
            break
    else:
        width = height = len(square)
    left = numbers[2 * ATTEMPTS] * (len(square) - width)
    top = numbers[2 * ATTEMPTS + 1] * (len(square) - height)
    out = np.empty((size, size, square.shape[2]))
    for i in range(size):
        for j in range(size):
            y, x = (np.clip(start + length * (k + 0.5) / size - 0.5, 0, len(square) - 1)
                    for start, length, k in ((top, height, i), (left, width, j)))  # fmt: skip
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, len(square) - 1), min(x0 + 1, len(square) - 1)
            upper = square[y0, x0] * (1 - (x - x0)) + square[y0, x1] * (x - x0)
            lower = square[y1, x0] * (1 - (x - x0)) + square[y1, x1] * (x - x0)
            out[i, j] = upper * (1 - (y - y0)) + lower * (y - y0)
    return out[:, ::-1] if numbers[-1] < 0.5 else out


@pytest.mark.parametrize("crop_fraction", [1.0, 0.75])
@pytest.mark.parametrize("augment", ["pad_crop", "resized_crop"])
def test_augmentation_equals_one_image_after_the_other(tmp_path, augment, crop_fraction):
    paint(tmp_path, {"a": 12, "b": 12}, size=(16, 16))
    data = opened(tmp_path, 12, 3, augment=augment, crop_fraction=crop_fraction, pad=3, min_scale=0.2)
    plain = opened(tmp_path, round(12 / crop_fraction), 3).train
    squares = pixels(plain.eval_batch()[0]).round().numpy()
    order = stream(0, "order", 5).permutation(len(data.train))
    batches = torch.cat([images for images, _ in data.train.train_batches(5, 4)])
    assert len(batches) == 16
    count = {"pad_crop": 3, "resized_crop": 2 * ATTEMPTS + 3}[augment]
    for sample, image in zip(order, pixels(batches), strict=False):
        numbers = uniforms(0, "augment", 5, np.array([sample]), count)[0]
        np.testing.assert_allclose(image, by_hand(squares[sample], numbers, augment, 12), atol=0.01)


@pytest.mark.parametrize("augment", ["none", "pad_crop", "resized_crop"])
def test_augmentation_depends_on_epoch_and_sample_alone(augment):
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


def test_crops_are_distributed_as_torchvisions():
    from scipy import stats
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.empty(1, 600, 900)
    theirs = np.array([RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(3000)])
    ours = crop_boxes(np.random.default_rng(0).random((3000, 22)), np.full(3000, 1.5), 0.08)
    ours = ours[:, [1, 0, 3, 2]] * [600, 900, 600, 900]
    for mine, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(mine.round(), other).pvalue > 0.001


def same_batches(first, second):
    for (images, labels), (expected, expected_labels) in zip(first, second, strict=True):
        if not (torch.equal(images, expected) and torch.equal(labels, expected_labels)):
            return False
    return True


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


def test_streaming_gives_what_memory_gives(tmp_path):
    paint(tmp_path, {"a": 20, "b": 30}, size=(20, 13))
    memory, disk = (opened(tmp_path, 8, 3, memory_gb=limit, crop_fraction=0.8) for limit in (1, 0))
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
def test_unreadable_files_in_a_stream(tmp_path, caplog, workers):
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
    monkeypatch.setattr(imagesets, "FEW", 10)
    monkeypatch.setattr(imagesets, "CHUNK", 7)
    there = opened(tmp_path, 8, 3, workers=2)
    assert same_batches([there.train_and_val().eval_batch()], [here.train_and_val().eval_batch()])
    assert there.notes == here.notes


# Balanced draws, weights, accuracy


@given(st.lists(st.integers(1, 12), min_size=2, max_size=10), st.data(), st.integers(0, 2**32))
def test_draws_are_balanced(counts, data, seed):
    images = fake_set(np.repeat(np.arange(len(counts)), counts))
    n = data.draw(st.integers(0, sum(counts)))
    drawn = images.balanced(n, np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn.tolist())) == n
    taken = np.bincount(images.labels.numpy()[drawn], minlength=len(counts))
    short = taken < counts
    assert (taken <= counts).all()
    if short.any():  # classes that could give more gave alike, and no less than any other
        assert taken[short].max() - taken[short].min() <= 1
        assert taken.max() <= taken[short].min() + 1
    assert (drawn == images.balanced(n, np.random.default_rng(seed))).all()


def fake_set(labels):
    """A set of which only the labels matter."""
    source = Files([str(i) for i in range(labels.max() + 1)], labels, [""] * len(labels))
    rows = np.arange(len(labels))
    return imagesets.Shelf(source, rows, None, None, CPU, 0, False).select(rows)


def test_balanced_draws_reach_every_image():
    images = fake_set(np.repeat([0, 1, 2], [30, 10, 20]))
    rng = np.random.default_rng(0)
    drawn = np.concatenate([images.balanced(10, rng) for _ in range(300)])
    counts = np.bincount(drawn, minlength=60)
    assert counts.min() > 0
    by_class = np.bincount(images.labels.numpy()[drawn])
    assert by_class.tolist() == pytest.approx([1000] * 3, abs=60)  # the remainder goes to random classes
    with pytest.raises(GreedyNASError, match="cannot draw 61 different images, there are 60"):
        images.balanced(61, rng)


def test_class_weights(tmp_path):
    paint(tmp_path / "train", {"a": 11, "b": 31})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    assert opened(tmp_path, 8, 3).class_weights is None
    weights = opened(tmp_path, 8, 3, val_images=2, class_weights="balanced").class_weights
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.5]))


def test_macro_accuracy_averages_over_the_classes_present():
    labels = torch.tensor([0, 0, 0, 0, 2, 2])
    correct = torch.tensor([True, True, True, False, False, True])
    assert macro_accuracy(correct, labels, 4) == pytest.approx((0.75 + 0.5) / 2)


# Decoding


def exif_saved(image, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(
        file, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {})
    )
    file.seek(0)
    return Image.open(file)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(kind, orientation):
    image = picture(0, (40, 24))
    turned = to_channels(exif_saved(image, orientation, kind), 3)
    expected = ImageOps.exif_transpose(exif_saved(image, orientation, kind))
    assert turned.size == ((24, 40) if orientation >= 5 else (40, 24))
    assert turned.tobytes() == expected.convert("RGB").tobytes()
    assert to_channels(turned, 3).tobytes() == turned.tobytes()
    numbers = np.concatenate([np.ones(ATTEMPTS), np.full(ATTEMPTS, 0.5), [0.5, 0.5, 1]])  # no attempt fits
    centre = np.asarray(square(exif_saved(image, orientation, kind), 3, 24)).astype(int)
    assert abs(random_crop(exif_saved(image, orientation, kind), 3, 24, numbers, 1.0) - centre).mean() < 40
    upright = random_crop(expected, 3, 24, numbers, 1.0).astype(int)
    assert abs(random_crop(exif_saved(image, orientation, kind), 3, 24, numbers, 1.0) - upright).max() <= 1


def test_orientation_six_means_a_quarter_to_the_right():
    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    turned = to_channels(exif_saved(image, 6, "PNG"), 3)
    assert [turned.getpixel((0, y)) for y in (0, 1)] == [(255, 0, 0), (0, 0, 255)]


def transparent(mode):
    """Half-transparent black on the left, opaque black on the right."""
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 127))
    return image if mode == "RGBA" else image.convert("LA").convert(mode)


def with_info(image, **info):
    image.info.update(info)
    return image


ODD = {  # image, expected RGB of its first and last pixel
    "1": (Image.fromarray(np.array([[False, True]])), (0, 255)),
    "L": (Image.fromarray(np.array([[7, 200]], np.uint8)), (7, 200)),
    "L with a transparent value": (with_info(Image.fromarray(np.array([[7, 200]], np.uint8)), transparency=7), (255, 200)),
    "16 bits": (Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16)), (0, 255)),
    "16 bits, dark": (Image.fromarray(np.array([[257, 514]], np.uint16)), (1, 2)),
    "32 bits with 16 used": (Image.fromarray(np.array([[0, 65535]], np.int32)), (0, 255)),
    "32 bits": (Image.fromarray(np.array([[-70000, 70000]], np.int32)), (0, 255)),
    "float to 1": (Image.fromarray(np.array([[0.2, 1.0]], np.float32)), (51, 255)),
    "float to 255": (Image.fromarray(np.array([[51, 255]], np.float32)), (51, 255)),
    "float beyond": (Image.fromarray(np.array([[-1000, 0, 1000]], np.float32)), (0, 255)),
    "float with nan": (Image.fromarray(np.array([[np.nan, np.inf, 1]], np.float32)), (0, 255)),
    "LA": (transparent("LA"), (128, 0)),
    "RGBA": (transparent("RGBA"), (128, 0)),
    "RGBa": (transparent("RGBA").convert("RGBa"), (128, 0)),
    "La": (transparent("LA").convert("La"), (128, 0)),
    "PA": (transparent("RGBA").convert("PA"), (128, 0)),
    "P": (Image.new("RGB", (2, 1), (9, 9, 9)).quantize(4), (9, 9)),
    "P with a transparent colour": (with_info(Image.new("RGB", (2, 1), (9, 9, 9)).quantize(4), transparency=0), (255, 255)),
    "CMYK": (Image.new("CMYK", (2, 1), (0, 0, 0, 55)), (200, 200)),
    "YCbCr": (Image.new("RGB", (2, 1), (90, 90, 90)).convert("YCbCr"), (90, 90)),
    "HSV": (Image.new("RGB", (2, 1), (90, 90, 90)).convert("HSV"), (90, 90)),
    "LAB": (Image.new("LAB", (2, 1), (255, 128, 128)), (255, 255)),
    "RGBX": (Image.new("RGBX", (2, 1), (90, 90, 90, 0)), (90, 90)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_modes(name):
    image, (first, last) = ODD[name]
    for channels, mode in ((1, "L"), (3, "RGB")):
        converted = np.asarray(to_channels(image.copy(), channels)).reshape(-1, channels).astype(int)
        assert to_channels(image.copy(), channels).mode == mode
        assert abs(converted[0] - first).max() <= 1
        assert abs(converted[-1] - last).max() <= 1


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("CMYK", "JPEG"), ("L", "JPEG"), ("P", "PNG"), ("P", "GIF"), ("LA", "PNG"), ("RGBA", "WEBP"), ("1", "PNG"),
     ("1", "TIFF"), ("CMYK", "TIFF"), ("I;16", "PNG"), ("I;16", "TIFF"), ("F", "TIFF"), ("RGBA", "TIFF"), ("P", "BMP")],
)  # fmt: skip
def test_odd_files_are_read(tmp_path, mode, kind):
    paint(tmp_path, {"a": 4, "b": 4})
    grey = picture(3, (30, 20), "L")
    wide = {"I;16": Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), "F": grey.convert("F")}
    image = wide.get(mode) or (grey.convert("RGB") if mode == "CMYK" else grey).convert(mode)
    (tmp_path / "a" / "0.png").unlink()
    image.save(tmp_path / "a" / f"0.{kind.lower()}", kind)
    data = opened(tmp_path, 8, 3, test_images=2, val_images=2)
    assert len(data.train) + len(data.val) + len(data.test()) == 8
    assert not any("skipped" in note for note in data.notes)
    with Image.open(tmp_path / "a" / f"0.{kind.lower()}") as read:
        decoded = square(read, 1, 20)[..., 0].astype(int)
    expected = square(grey, 1, 20)[..., 0]
    if mode == "1":  # black and white dots that make the same grey
        decoded, expected = decoded.mean(), expected.mean()
    assert np.mean(abs(decoded - expected)) < 4


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (2, 7), (500, 3), (37, 41), (300, 200)])
def test_odd_sizes(size):
    image = picture(0, size)
    assert square(image, 3, 32).shape == (32, 32, 3)
    assert square(image, 1, 32).shape == (32, 32, 1)
    for seed in range(5):
        assert random_crop(image, 3, 32, np.random.default_rng(seed).random(23), 0.08).shape == (32, 32, 3)


def test_a_square_is_the_centre():
    image = Image.new("RGB", (30, 10), "red")
    image.paste("blue", (10, 0, 20, 10))
    assert (square(image, 3, 10) == [0, 0, 255]).all()
    turned = square(image.transpose(Image.Transpose.ROTATE_90), 3, 5)
    assert (turned[1:-1] == [0, 0, 255]).all()  # at the edge, neighbours outside of the square count in


def test_large_jpegs_are_shrunk_while_decoding_without_harm():
    file = io.BytesIO()
    picture(1, (1600, 1200)).save(file, "JPEG", quality=95)
    fast = Image.open(io.BytesIO(file.getvalue()))
    quick, slow = square(fast, 3, 64), square(Image.open(io.BytesIO(file.getvalue())).convert("RGB"), 3, 64)
    assert fast.size == (200, 150)
    assert abs(quick.astype(int) - slow.astype(int)).max() <= 3
    numbers = np.random.default_rng(0).random(23)
    fast = Image.open(io.BytesIO(file.getvalue()))
    quick = random_crop(fast, 3, 64, numbers, 0.5)
    assert fast.size < (1600, 1200)
    slow = random_crop(Image.open(io.BytesIO(file.getvalue())).convert("RGB"), 3, 64, numbers, 0.5)
    assert abs(quick.astype(int) - slow.astype(int)).max() <= 4


# Unreadable files


def bomb():
    """A PNG that says it has 3.6 billion pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def test_unreadable_files_are_named_and_skipped_or_refused(tmp_path):
    paint(tmp_path / "train", {"a": 12, "b": 12})
    paint(tmp_path / "test", {"a": 3, "b": 3}, first=1)
    bad = [tmp_path / "train" / "a" / f"{i}.png" for i in range(4)]
    for file, how in zip(bad, ("truncated", "empty", "text"), strict=False):
        spoil(file, how)
    bad[3].write_bytes(bomb())
    spoil(tmp_path / "test" / "a" / "0.png")
    data = opened(tmp_path, 8, 3)
    assert len(data.train) + len(data.val) == 20
    skipped = [note for note in data.notes if note.startswith("skipped")]
    assert len(skipped) == 4
    for file, why in zip(bad, ("truncated", "no image", "no image", "decompression bomb"), strict=True):
        assert any(str(file) in note and why in note for note in skipped)
    assert len(data.test()) == 5  # found only now: test images are not decoded before
    assert str(tmp_path / "test" / "a" / "0.png") in data.notes[-2]
    with pytest.raises(GreedyNASError, match=r"cannot read .*0.png: .*; repair or remove it, or set data.unreadable"):
        opened(tmp_path, 8, 3, unreadable="refuse")


def test_many_unreadable_files_are_counted(tmp_path):
    paint(tmp_path, {"a": 40, "b": 10})
    for i in range(30):
        spoil(tmp_path / "a" / f"{i}.png", "text")
    data = opened(tmp_path, 8, 3, test_images=2, val_images=10)
    skipped = [note for note in data.notes if note.startswith("skipped")]
    assert len(skipped) == 21
    assert "more" in skipped[-1]


def test_a_class_without_readable_images_is_refused(tmp_path):
    paint(tmp_path, {"a": 10, "b": 10})
    for file in (tmp_path / "b").iterdir():
        spoil(file)
    with pytest.raises(GreedyNASError, match="no readable image of class 'b' is left"):
        opened(tmp_path, 8, 3)


def small_files():
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        file = io.BytesIO()
        picture(0, (6, 5)).save(file, kind)
        yield kind, file.getvalue()


@pytest.mark.filterwarnings("ignore")  # Pillow's, about broken files
@pytest.mark.parametrize(("kind", "data"), list(small_files()))
def test_damage_makes_an_image_unreadable_or_different_but_nothing_worse(tmp_path, kind, data):
    view = View(8, 8, 3, "resized_crop", 0, 0.08, True, 0)
    file = tmp_path / "image"
    source = Files(["a"], np.zeros(1, np.int64), [str(file)])
    rng = np.random.default_rng(0)
    for case in range(120):
        damaged = bytearray(data)
        if case % 2:
            damaged = damaged[: rng.integers(len(data))]
        else:
            damaged[rng.integers(len(data))] = rng.integers(256)
        file.write_bytes(damaged)
        for numbers in (None, rng.random(23)):
            with contextlib.suppress(Unreadable):
                assert imagesets._read(source, 0, view, numbers).shape == (8, 8, 3)


# Copies


def test_copies_between_train_and_test_are_counted(tmp_path):
    paint(tmp_path / "train", {"a": 10, "b": 10})
    paint(tmp_path / "test", {"a": 5, "b": 5}, first=1)
    for i in range(3):
        (tmp_path / "test" / "a" / f"copy{i}.png").write_bytes((tmp_path / "train" / "b" / f"{i}.png").read_bytes())
    notes = opened(tmp_path, 8, 3).notes
    assert any(note.startswith("3 of 13 test images are exact copies") and "copy0.png" in note for note in notes)
    assert opened(tmp_path, 8, 3, check_duplicates=False).notes == notes[:-1]


def test_copies_are_found_in_what_is_held_out_and_in_arrays(tmp_path):
    (tmp_path / "a").mkdir()
    paint(tmp_path, {"a": 1, "b": 9})
    for i in range(1, 10):
        (tmp_path / "a" / f"{i}.png").write_bytes((tmp_path / "a" / "0.png").read_bytes())
    assert any(note.startswith("2 of 4 test images are exact copies") for note in opened(tmp_path, 8, 3).notes)


# Data sets by name


def idx(array):
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_a_torchvision_set_by_name(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 60), ("t10k", 20)):
        arrays[split] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10
    arrays["t10k"][0][0] = arrays["train"][0][0]
    for split, (images, labels) in arrays.items():
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    data = opened("torch/fashion_mnist", root=str(tmp_path), val_images=10)
    assert data.class_names[9] == "Ankle boot"
    assert (pixels(data.train_and_val().eval_batch()[0], 1)[..., 0].round().numpy() == arrays["train"][0]).all()
    assert (pixels(data.test().eval_batch()[0], 1)[..., 0].round().numpy() == arrays["t10k"][0]).all()
    assert any(note.startswith("1 of 20 test images") for note in data.notes)
    colour = opened("torch/fashion_mnist", 32, 3, root=str(tmp_path), val_images=10)  # resized, grey to RGB
    assert colour.train.eval_batch([0])[0].shape == (1, 3, 32, 32)
    streaming = opened("torch/fashion_mnist", 32, 3, root=str(tmp_path), val_images=10, memory_gb=0)
    assert same_batches(colour.train.train_batches(0, 8), streaming.train.train_batches(0, 8))


def test_a_colour_set_of_torchvision(tmp_path):
    """CIFAR-10's files as torchvision reads them; by its name it insists on the checksums of the originals."""
    from torchvision.datasets import CIFAR10

    class Unchecked(CIFAR10):
        train_list = (("data_batch_1", None),)
        test_list = (("test_batch", None),)
        meta = {"filename": "batches.meta", "key": "label_names", "md5": None}  # noqa: RUF012

    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, content in (
        ("data_batch_1", {"data": images.reshape(20, -1), "labels": [i % 2 for i in range(20)]}),
        ("test_batch", {"data": images[:4].reshape(4, -1), "labels": [0, 1, 0, 1]}),
        ("batches.meta", {"label_names": ["airplane", "automobile"]}),
    ):
        (folder / name).write_bytes(pickle.dumps(content))
    source = _from_torchvision(Unchecked(str(tmp_path), train=True))
    assert source.class_names == ["airplane", "automobile"]
    assert (source.ready(np.array([3, 5]), 32, 3) == images[[3, 5]].transpose(0, 2, 3, 1)).all()
    assert source.ready(np.array([3]), 32, 1) is None  # to be converted to grey
    assert (np.asarray(source.image(7)) == images[7].transpose(1, 2, 0)).all()
    assert source.labels.tolist() == [0, 1] * 10


def png(seed):
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


def write_shard(file, samples):
    with tarfile.open(file, "w") as shard:
        for i in samples:
            for extension, content in (("png", png(i)[: 40 if i == 7 else None]), ("cls", str(5 + i % 2).encode())):
                member = tarfile.TarInfo(f"{i:04d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def test_webdataset_shards(tmp_path):
    pytest.importorskip("webdataset")
    for name, samples in (("x-train-0", range(20)), ("x-train-1", range(20, 40)), ("x-val-0", range(35, 45))):
        write_shard(tmp_path / f"{name}.tar", samples)
    data = opened("wds/x", 8, 3, root=str(tmp_path))
    assert data.class_names == ["5", "6"]
    assert len(data.train_and_val()) == 39
    assert any(note.startswith("skipped 1 unreadable images in wds/x") for note in data.notes)
    assert len(data.test()) == 10
    assert any(note.startswith("5 of 10 test images are exact copies") for note in data.notes)
    expected = torch.tensor(square(picture(36), 3, 8)).float()
    torch.testing.assert_close(pixels(data.test().eval_batch([1])[0])[0], expected, atol=0.01, rtol=0)
    with pytest.raises(GreedyNASError, match="1 unreadable images"):
        opened("wds/x", 8, 3, root=str(tmp_path), unreadable="refuse")
    with pytest.raises(GreedyNASError, match=r"does not fit .* raise data.memory_gb, or unpack it"):
        opened("wds/x", 8, 3, root=str(tmp_path), memory_gb=1e-6)


def test_hugging_face_sets(tmp_path):
    pytest.importorskip("datasets")
    paint(tmp_path / "set" / "train", {"a": 10, "b": 10})
    paint(tmp_path / "set" / "test", {"a": 3, "b": 3}, first=1)
    memory, disk = (
        opened(f"hfds/{tmp_path}/set", 8, 3, root=str(tmp_path / "cache"), memory_gb=limit) for limit in (1, 0)
    )
    folder = opened(tmp_path / "set", 8, 3)
    assert folder.class_names == memory.class_names
    assert (len(memory.train), len(memory.val), len(memory.test())) == (18, 2, 6)
    assert same_batches(memory.train.train_batches(0, 8), disk.train.train_batches(0, 8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torch/cifar10", "cannot read torch/cifar10 in .*not found.*; set data.root to where it is, or data.download"),
        ("torch/mnist", "cannot read torch/mnist in .*not found"),
        ("torch/imagenet", "cannot read torch/imagenet"),
        ("torch/cifar1", "unknown torchvision data set 'torch/cifar1' .did you mean 'torch/cifar10'.*"),
        ("cifar10", "no such data: 'cifar10'; did you mean torch/cifar10"),
        ("", "no such data: ''; give a folder"),
        ("x" * 5000, "cannot read x"),
        ("no/such/folder", "no such data: 'no/such/folder'; give a folder with train/"),
        (__file__, "is a file; give a folder"),
    ],
)
def test_missing_data_is_one_clear_line(tmp_path, source, message):
    with pytest.raises(GreedyNASError, match=message) as error:
        opened(source, root=str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "package"), [("hfds", "datasets"), ("hfids", "datasets"), ("wds", "webdataset"), ("tfds", "tensorflow-datasets")])  # fmt: skip
def test_missing_packages_are_named(kind, package):
    if find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    with pytest.raises(GreedyNASError, match=f"{kind}/some/set needs the package {package}, .* pip install {package}$"):
        opened(f"{kind}/some/set")


# Wrong folders and settings


def folder_problems():
    yield "no images in", lambda root: (root / "train" / "a").mkdir(parents=True)
    yield "no images in", lambda root: None
    yield "no images of class c in", lambda root: (paint(root, {"a": 5, "b": 5}), (root / "c").mkdir())
    yield "at least two classes are needed, there is only a", lambda root: paint(root, {"a": 9})
    yield "not in class folders", lambda root: picture(0).save(root / "a.png")
    yield "not in class folders", lambda root: ((root / "train").mkdir(), picture(0).save(root / "train" / "a.png"))
    yield "class 'b' has too few images .2.: at least 3", lambda root: paint(root, {"a": 9, "b": 2})
    yield (
        "has no train/ beside test/ and val/",
        lambda root: (paint(root / "test", {"a": 2}), paint(root / "val", {"a": 2})),
    )
    yield (
        "the test set has a class 'c' that the training set lacks",
        lambda root: (
            paint(root / "train", {"a": 9, "b": 9}),
            paint(root / "test", {"a": 2, "c": 2}),
        ),
    )
    yield (
        "the validation set has a class 'c'",
        lambda root: (
            paint(root / "train", {"a": 9, "b": 9}),
            paint(root / "test", {"a": 2}),
            paint(root / "val", {"c": 2}),
        ),
    )
    yield (
        "mean the same split",
        lambda root: [paint(root / name, {"a": 3, "b": 3}) for name in ("train", "val", "valid")],
    )


@pytest.mark.parametrize(("message", "make"), list(folder_problems()))
def test_wrong_folders_are_one_clear_line(tmp_path, message, make):
    make(tmp_path)
    with pytest.raises(GreedyNASError, match=message) as error:
        opened(tmp_path, 8, 3)
    assert "\n" not in str(error.value)


def test_a_test_set_may_lack_classes(tmp_path):
    paint(tmp_path / "train", {"a": 9, "b": 9, "c": 9})
    paint(tmp_path / "test", {"c": 4}, first=1)
    assert opened(tmp_path, 8, 3).test().labels.tolist() == [2] * 4


@pytest.mark.parametrize(
    "settings",
    [{"val_images": 0}, {"val_images": 1.5}, {"test_images": 0.0}, {"val_images": -3}, {"augment": "mixup"}, {"pad": -1},
     {"min_scale": 0}, {"crop_fraction": 1.5}, {"memory_gb": -1}, {"workers": -1}, {"unreadable": "ignore"}, {"sauce": "x"}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DataSettings(**settings)


def test_counts_and_fractions_keep_their_type():
    settings = DataSettings.model_validate({"val_images": 500, "test_images": 0.5})
    assert (settings.val_images, settings.test_images) == (500, 0.5)
    assert isinstance(settings.val_images, int)
    assert DataSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(GreedyNASError, match="not 5"):
        opened(channels=5)


def test_the_sample_can_be_made_again(tmp_path, monkeypatch):
    """The tool on a small stand-in for the original files."""
    for prefix, n in (("train", 9000), ("t10k", 2500)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = np.broadcast_to((np.arange(n) % 251).astype(np.uint8)[:, None, None], (n, 28, 28))
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(np.ascontiguousarray(array)), 1))
    tool = FASHION.parents[1] / "tools" / "make_fashion_sample.py"
    monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path), str(tmp_path / "out.npz")])
    runpy.run_path(str(tool), run_name="__main__")
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert arrays["train_images"].shape == (8000, 28, 28)
        assert np.bincount(arrays["test_labels"]).tolist() == [200] * 10
