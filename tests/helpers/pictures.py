"""Images and folders of images for the tests of data."""

import struct
import zlib

import numpy as np
import torch
from PIL import Image

from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.data.transforms import normalisation

CPU = torch.device("cpu")


def opened(source="fashion", size=28, channels=1, seed=0, **settings):
    settings = DataSettings(source=str(source), **{"workers": 0, **settings})
    return open_data(settings, image_size=size, image_channels=channels, seed=seed, device=CPU)


def picture(seed, size=(12, 10), mode="RGB"):
    """Return a smooth random image, whose neighbouring pixels are similar, as in photographs."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC).convert(mode)


def paint(folder, counts, first=0, size=(12, 10)):
    """Write a folder with the given number of different images of each class, and return it."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture([first, zlib.crc32(name.encode()), i], size).save(folder / name / f"{i}.png")
    return folder


def pixels(batch, channels=3):
    """Convert normalised images back to 0..255, (n, size, size, channels)."""
    mean, std = (torch.tensor(values)[:, None, None] for values in normalisation(channels))
    return ((batch * std + mean) * 255).permute(0, 2, 3, 1)


def spoil(file, how="truncated"):
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "text": b"not an image"}[how])


def same_batches(first, second):
    for (images, labels), (expected, expected_labels) in zip(first, second, strict=True):
        if not (torch.equal(images, expected) and torch.equal(labels, expected_labels)):
            return False
    return True


def large_png(side, depth, colour):
    """Return a small PNG file with a black image of side × side pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" * (1 + side * {0: 1, 2: 3, 6: 4}[colour] * depth // 8)
    packer = zlib.compressobj(1)
    packed = b"".join([packer.compress(row) for _ in range(side)]) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
