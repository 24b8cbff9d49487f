"""Random crops of images (`data.augment: resized_crop`) are the same from memory and from files."""

import numpy as np
import pytest
import torch
from PIL import Image

from greedynas.data import loader
from greedynas.data.crops import AT_ONCE, Growing, WholeImages
from greedynas.data.transforms import LONGEST, View, decoded_alike, open_image, seen_part, square, whole, whole_size
from greedynas.runtime.rng import stream
from tests.helpers.exif import exif_saved
from tests.helpers.pictures import opened, paint, pixels, same_batches, spoil

CPU = torch.device("cpu")
SHAPES = [(600, 200), (200, 600), (300, 300), (90, 70), (1000, 120), (120, 1000)]
SIDE = 32


def map_of(size):
    """Return a picture whose red is the horizontal position of a pixel, and whose green the vertical one."""
    across, down = (np.linspace(0, 255, length).round() for length in size)
    values = np.zeros((size[1], size[0], 3))
    values[..., 0], values[..., 1] = across, down[:, None]
    return Image.fromarray(values.astype(np.uint8))


def texture(seed, size):
    """Return a random picture with the spectrum of photographs (1 / frequency), where coarse details dominate."""
    rng, (width, height) = np.random.default_rng(seed), size
    frequency = np.hypot(np.fft.fftfreq(width)[None], np.fft.fftfreq(height)[:, None])
    noise = np.fft.fft2(rng.standard_normal((3, height, width))) / np.maximum(frequency, 1 / max(size))
    waves = np.fft.ifft2(noise).real
    waves = (waves - waves.mean((1, 2), keepdims=True)) / waves.std((1, 2), keepdims=True)
    return Image.fromarray((128 + 55 * waves).clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def folder_of(folder, pictures, ending="png"):
    """Create two classes with the same pictures."""
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i, picture in enumerate(pictures):
            picture.save(folder / name / f"{i}.{ending}", **({"quality": 90} if ending == "jpg" else {}))
    return folder


def both_ways(folder, **settings):
    settings = {"augment": "resized_crop", "min_scale": 0.3, "test_images": 2, "val_images": 2, **settings}
    settings["check_duplicates"] = False
    memory, disk = (opened(folder, SIDE, 3, memory_gb=limit, **settings) for limit in (1, 0))
    assert memory.train.in_memory
    assert not disk.train.in_memory
    return memory, disk


def epoch_of(data, epoch, batch=4):
    """Return the samples in order, 0 to 255, including the images of an incomplete last batch."""
    batches = [images for images, _ in data.train.train_batches(epoch, batch)]
    return pixels(torch.cat(batches))


# The same crops


@pytest.mark.parametrize("size", SHAPES)
def test_every_image_has_the_same_crop_in_every_epoch(tmp_path, size):
    folder = folder_of(tmp_path, [map_of(size)] * 4)
    memory, disk = both_ways(folder)
    for epoch in range(3):
        one, other = epoch_of(memory, epoch), epoch_of(disk, epoch)
        assert (one - other).abs().max() <= 2.5  # of 255, from rounding in the maps
        assert (one[..., 0].amax((1, 2)) - one[..., 0].amin((1, 2))).min() > 20  # the crops have some contrast


@pytest.mark.parametrize(("size", "edge"), [((600, 200), 0), ((200, 600), 1)])
def test_the_edges_of_long_images_are_cropped_equally_often(tmp_path, size, edge):
    """Check pixels outside of the centred square: crops from memory once had none of them, those of a stream 37%."""
    folder = folder_of(tmp_path, [map_of(size)] * 12)
    shares = []
    for data in both_ways(folder):
        seen = torch.cat([epoch_of(data, epoch) for epoch in range(10)])[..., edge]
        shares.append(float(((seen < 255 / 3) | (seen > 255 * 2 / 3)).float().mean()))
    assert shares[0] == pytest.approx(shares[1], abs=0.002)
    assert 0.3 < shares[0] < 0.7


@pytest.mark.parametrize("size", [(1000, 120), (120, 1000)])
def test_very_long_images_are_cropped_in_their_centre_both_ways(tmp_path, size):
    folder = folder_of(tmp_path, [map_of(size)] * 12)
    along = int(size[1] > size[0])
    low, high = 255 * (0.5 - 0.18), 255 * (0.5 + 0.18)  # 360 of 1,000 pixels
    for data in both_ways(folder):
        seen = torch.cat([epoch_of(data, epoch) for epoch in range(10)])[..., along]
        assert seen.min() > low - 1
        assert seen.max() < high + 1
        assert seen.min() < low + 15
        assert seen.max() > high - 15


def test_the_part_that_crops_are_taken_from():
    assert seen_part(600, 200) == (0, 0, 600, 200)
    assert seen_part(601, 200) == (0, 0, 600, 200)
    assert seen_part(1000, 120) == (320, 0, 680, 120)
    assert seen_part(1, 10) == (0, 3, 1, 6)
    assert whole_size(1000, 120, 60) == (180, 60)
    assert whole_size(100, 40, 60) == (100, 40)
    assert whole_size(1, 1000, 60) == (1, LONGEST)


# The same pixels


@pytest.mark.parametrize("size", [(58, 40), (40, 58), (30, 30), (130, 35)])
def test_images_that_are_kept_unchanged_give_the_same_pixels(tmp_path, size):
    memory, disk = both_ways(folder_of(tmp_path, [texture(i, size) for i in range(8)]))
    assert memory.train.view.whole == 59 >= min(size)
    for epoch in range(3):
        one, other = epoch_of(memory, epoch), epoch_of(disk, epoch)
        if max(size) <= LONGEST * min(size):
            assert torch.equal(one, other)
        else:  # in a stream, a filter at the edge of the part reads beyond it
            assert (one - other).abs().mean() < 0.05


@pytest.mark.parametrize("ending", ["png", "jpg"])
@pytest.mark.parametrize("size", [(150, 110), (400, 300), (90, 240)])
def test_larger_images_are_resampled_twice_with_little_loss(tmp_path, size, ending):
    memory, disk = both_ways(folder_of(tmp_path, [texture(i, size) for i in range(6)], ending))
    one, other = (torch.cat([epoch_of(data, epoch) for epoch in range(4)]) for data in (memory, disk))
    difference = (one - other).abs()
    assert difference.mean() < 1.6  # of 255; it was above 30 with crops of the centred square
    assert difference.mean((1, 2, 3)).max() < 3
    sharpness = [float((images[:, :, 1:] - images[:, :, :-1]).abs().mean()) for images in (one, other)]
    assert sharpness[0] == pytest.approx(sharpness[1], rel=0.05)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_rotated_photographs_are_kept_upright(orientation, kind):
    image = map_of((240, 120))
    kept, aspect = whole(exif_saved(image, orientation, kind), 3, 60)
    expected, _ = whole(exif_saved(image, 1, kind).transpose(_turned(orientation)) if orientation > 1 else image, 3, 60)
    assert aspect == (0.5 if orientation >= 5 else 2)
    assert kept.shape == expected.shape == ((120, 60, 3) if orientation >= 5 else (60, 120, 3))
    assert abs(kept.astype(int) - expected).max() <= (12 if kind == "JPEG" else 3)


def _turned(orientation):
    return {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_270,
        8: Image.Transpose.ROTATE_90,
    }[orientation]


def test_a_crop_does_not_depend_on_its_batch(tmp_path):
    memory, _ = both_ways(folder_of(tmp_path, [texture(i, (150, 90 + 7 * i)) for i in range(8)]))
    order = stream(0, "order", 2).permutation(len(memory.train))
    one, other = (epoch_of(memory, 2, batch) for batch in (3, 6))
    for sample in range(len(order)):
        places = [np.flatnonzero(order[: len(images)] == sample) for images in (one, other)]
        if all(len(place) for place in places):
            assert torch.equal(one[places[0][0]], other[places[1][0]])


def test_threads_do_not_change_crops(tmp_path):
    memory, _ = both_ways(folder_of(tmp_path, [texture(i, (80, 60)) for i in range(6)]))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(epoch_of(memory, 0))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("more", [{"randaugment": "rand-m9"}, {"erasing": 0.5}])
def test_further_augmentation_starts_from_the_same_crops(tmp_path, more):
    memory, disk = both_ways(folder_of(tmp_path, [texture(i, (58, 40)) for i in range(8)]))
    one, other = (data.train.seen(**more).train_batches(1, 4) for data in (memory, disk))
    assert same_batches(one, other)


def test_retraining_crops_held_out_images_too(tmp_path):
    memory, disk = both_ways(folder_of(tmp_path, [texture(i, (58, 40)) for i in range(8)]))
    assert len(memory.train_and_val()) == len(memory.train) + 2
    assert same_batches(memory.train_and_val().train_batches(0, 5), disk.train_and_val().train_batches(0, 5))


def test_a_set_that_is_kept_only_for_evaluation_is_cropped_from_its_files(tmp_path):
    for number, split in enumerate(("train", "val", "test")):
        folder_of(tmp_path / split, [texture([number, i], (58, 40)) for i in range(4)])
    spoil(tmp_path / "val" / "a" / "1.png")
    memory, disk = both_ways(tmp_path)
    assert memory.val.in_memory
    assert memory.val._shelf.wholes is None
    assert len(list(memory.val.train_batches(0, 3))) == 2
    assert same_batches(memory.train.train_batches(0, 3), disk.train.train_batches(0, 3))


def test_arrays_of_the_right_size_are_not_kept_twice():
    data = opened(augment="resized_crop", min_scale=0.3, val_images=7800)
    shelf = data._pool
    assert shelf.wholes.pixels.data_ptr() == shelf.pixels.data_ptr()
    assert any(note.endswith(f"({CPU.type}, {shelf.pixels.nbytes / 1e6:,.0f} MB)") for note in data.notes)
    disk = opened(augment="resized_crop", min_scale=0.3, val_images=7800, memory_gb=0)
    assert same_batches(data.train.train_batches(0, 50), disk.train.train_batches(0, 50))


# Evaluation


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_evaluation_uses_the_same_pixels(tmp_path, ending):
    """Check the centre of the square of a file, decoded for it alone or once for square and crops."""
    sizes = [(500, 150), (60, 80), (40, 40), (300, 700), (1000, 900)]
    folder_of(tmp_path, [texture(i, size) for i, size in enumerate(sizes)], ending)
    memory, disk = both_ways(tmp_path, crop_fraction=0.8)
    images = memory.train_and_val()
    source, rows = memory._pool.source, memory._pool.rows
    for image, row in zip(pixels(images.eval_batch()[0]).round(), rows, strict=True):
        with source.image(row) as file:
            expected = square(file, 3, 40)[4:36, 4:36]
        np.testing.assert_array_equal(image, expected)
    assert same_batches([images.eval_batch()], [disk.train_and_val().eval_batch()])


def test_large_jpegs_are_decoded_once_if_that_is_enough(tmp_path):
    alike = []
    for i, size in enumerate([(200, 100), (1000, 900), (3000, 2000)]):
        Image.new("RGB", size).save(tmp_path / f"{i}.jpg")
        with open_image(tmp_path / f"{i}.jpg") as image:
            alike.append(decoded_alike(image, 40, 59))
    assert alike == [True, False, True]  # shrunk by factors of 1, of 8 and 4, of 8 and 8


# Crops on a GPU


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_gives_the_same_crops_as_single_images(channels):
    rng = np.random.default_rng(channels)
    sizes = [(40, 60), (60, 40), (33, 99), (20, 20), (200, 70), (7, 5), (1, 3)]
    images = [np.asarray(texture(i, (w, h)))[..., :channels] for i, (h, w) in enumerate(sizes)]
    growing = Growing(channels, CPU, 10, 10**6)
    for image in images:
        height, width = image.shape[:2]
        flat = torch.from_numpy(image.reshape(-1, channels).copy())
        assert growing.add(flat, np.array([[height, width]]), np.array([width / height]))
    wholes = growing.wholes()
    for row, image in enumerate(images):
        np.testing.assert_array_equal(wholes.image(row), image)
    view = View(SIDE, SIDE, channels, "resized_crop", 0, 0.1, True, 0)
    rows = rng.integers(0, len(images), 150)
    plan = view.crop_plan(3, np.arange(150), wholes.aspects[rows])
    assert 40 < plan[:, 4].sum() < 110
    one, other = wholes.crops(rows, plan, SIDE), wholes.batched(rows, plan, SIDE)
    assert other.shape == one.shape == (150, SIDE, SIDE, channels)
    assert (one - other).abs().max() <= 1.01  # Pillow rounds after each of two passes
    assert len(rows) > AT_ONCE
    parts = [wholes.batched(rows[i : i + 64], plan[i : i + 64], SIDE) for i in (0, 64, 128)]
    torch.testing.assert_close(torch.cat(parts), other, rtol=0, atol=1e-3)


def test_squares_are_whole_images():
    squares = torch.randint(0, 256, (5, 9, 9, 3), dtype=torch.uint8)
    wholes = WholeImages.of_squares(squares)
    assert all(torch.equal(wholes.image(i), squares[i]) for i in range(5))


# Memory


def test_the_memory_of_whole_images_decides_whether_they_are_kept(tmp_path):
    folder_of(tmp_path, [texture(i, (240, 120)) for i in range(10)])
    settings = {
        "augment": "resized_crop",
        "min_scale": 0.3,
        "test_images": 2,
        "val_images": 2,
        "check_duplicates": False,
    }
    needed = 18 * (SIDE**2 + 59 * 118) * 3
    data = opened(tmp_path, SIDE, 3, memory_gb=1.001 * needed / 1e9, **settings)
    assert data._pool.pixels.nbytes + data._pool.wholes.pixels.nbytes == needed
    assert any(f"18 images in memory (cpu, {needed / 1e6:,.0f} MB)" in note for note in data.notes)
    less = opened(tmp_path, SIDE, 3, memory_gb=0.999 * needed / 1e9, **settings)
    assert not less.train.in_memory
    assert less.val.in_memory  # only squares
    shifted = opened(tmp_path, SIDE, 3, memory_gb=18 * SIDE**2 * 3 / 1e9, **{**settings, "augment": "pad_crop"})
    assert shifted.train.in_memory
    assert shifted._pool.wholes is None


def test_images_that_turn_out_larger_than_estimated_are_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "HEADERS", 2)
    folder_of(tmp_path, [texture(i, (240 if 0 < i < 9 else 60, 60)) for i in range(10)])
    settings = {
        "augment": "resized_crop",
        "min_scale": 0.3,
        "test_images": 2,
        "val_images": 2,
        "check_duplicates": False,
    }
    limit = 18 * (SIDE**2 + 59 * 80) * 3
    data = opened(tmp_path, SIDE, 3, memory_gb=limit / 1e9, **settings)
    assert not data.train.in_memory
    enough = opened(tmp_path, SIDE, 3, memory_gb=2.5 * limit / 1e9, **settings)  # the memory grows
    assert enough.train.in_memory
    monkeypatch.undo()
    known = opened(tmp_path, SIDE, 3, **settings)
    assert same_batches(enough.train.train_batches(0, 4), known.train.train_batches(0, 4))


def test_broken_files_are_left_out_of_both(tmp_path, monkeypatch):
    paint(tmp_path, {"a": 14, "b": 16}, size=(58, 40))
    for name in ("a/3.png", "b/0.png", "b/15.png"):
        spoil(tmp_path / name)
    settings = {"augment": "resized_crop", "min_scale": 0.3, "check_duplicates": False, "test_images": 2}
    data = opened(tmp_path, SIDE, 3, **settings)
    shelf = data._pool
    assert len(shelf.rows) == len(shelf.pixels) == len(shelf.wholes.sizes) in (25, 26, 27)
    for i, row in enumerate(shelf.rows):
        with shelf.source.image(row) as image:
            np.testing.assert_array_equal(shelf.wholes.image(i), np.asarray(image))
    monkeypatch.setattr(loader, "CHUNK", 4)
    other = opened(tmp_path, SIDE, 3, **settings)
    assert same_batches(data.train.train_batches(0, 5), other.train.train_batches(0, 5))
