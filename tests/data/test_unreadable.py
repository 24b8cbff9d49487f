import contextlib
import io
import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from greedynas.data import loader, transforms
from greedynas.data.sources import Files
from greedynas.data.transforms import Unreadable, View
from greedynas.runtime.errors import GreedyNASError
from tests.helpers.paths import ROOT
from tests.helpers.pictures import large_png, opened, paint, picture, spoil


def bomb():
    """Return a PNG whose header says that it has 3.6 billion pixels."""

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
    assert len(data.test()) == 5  # the broken one is found only now, when test images are decoded
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
                assert loader._read(source, 0, view, numbers).shape == (8, 8, 3)


# Memory

PEAK = """
import io, json, os, resource, sys
import numpy as np
from PIL import Image
from greedynas.data.transforms import random_crop, square
from tests.helpers.pictures import large_png

square(Image.new("I;16", (64, 64)), 3, 8)  # imports what is imported late
for side, depth, colour, how in json.loads(sys.argv[1]):
    file = io.BytesIO(large_png(side, depth, colour))
    child = os.fork()
    if child == 0:
        before, why = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "decoded"
        try:
            with Image.open(file) as image:
                if how == "crop":
                    random_crop(image, 3, 8, np.random.default_rng(0).random(23), 0.08)
                else:
                    square(image, 3, 8)
        except Exception as error:
            why = str(error)
        most = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(json.dumps([len(file.getvalue()), most, why]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_decoding_takes_little_memory(tmp_path):
    """Decode each picture in a process of its own and compare the memory.

    Pictures that fit need little more than themselves and their conversion to RGB (16 bits needed thirteen times the
    picture, in float64); others are refused by their headers.
    """
    fitting = [(5000, 16, 0, "square"), (5000, 16, 0, "crop"), (3000, 8, 6, "square")]
    too_large = [(12_000, 16, 0, "square"), (8_200, 8, 2, "crop")]
    command = [sys.executable, "-c", PEAK, json.dumps(fitting + too_large)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 5, done.stderr
    for (side, depth, _, _), (size, most, why) in zip(fitting, found, strict=False):
        assert (size < 400_000, why) == (True, "decoded")
        assert most < 5 * side * side * (2 if depth == 16 else 4)
    for size, most, why in found[3:]:
        assert size < 1_500_000
        assert most < 20_000_000
        assert why.startswith("decoding it takes 2")
        assert why.endswith(" MB, more than the 268 MB allowed; make it smaller")


def test_a_picture_that_is_too_large_is_skipped_and_named(tmp_path):
    paint(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "a" / "3.png").write_bytes(large_png(8_200, 8, 2))
    data = opened(tmp_path, 8, 3, val_images=4)
    data.test()
    assert sum("3.png (decoding it takes 269 MB, more than" in note for note in data.notes) == 1


def test_a_progressive_jpeg_keeps_all_its_coefficients(monkeypatch):
    """Check that the size on decoding does not matter."""
    monkeypatch.setattr(transforms, "MAX_DECODED", 400_000)
    for progressive, subsampling, fits in ((False, 0, True), (True, 0, False), (True, 2, True)):
        file = io.BytesIO()
        picture(0, (320, 320)).save(file, "JPEG", progressive=progressive, subsampling=subsampling)
        with (
            Image.open(file) as image,
            contextlib.nullcontext() if fits else pytest.raises(Unreadable, match="decoding it takes 1 MB"),
        ):
            assert transforms.square(image, 3, 8).shape == (8, 8, 3)
