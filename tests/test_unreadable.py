import contextlib
import io
import struct
import zlib

import numpy as np
import pytest

from greedynas import imagesets
from greedynas.errors import GreedyNASError
from greedynas.images import Unreadable, View
from greedynas.sources import Files
from tests.pictures import opened, paint, picture, spoil


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
