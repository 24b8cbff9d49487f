import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from greedynas.data.transforms import ATTEMPTS, random_crop, square, to_channels
from tests.helpers.exif import exif_saved
from tests.helpers.pictures import opened, paint, picture


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_rotated_upright(kind, orientation):
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


def test_orientation_six_is_a_quarter_turn_to_the_right():
    image = Image.new("RGB", (2, 1), "red")
    image.putpixel((1, 0), (0, 0, 255))
    turned = to_channels(exif_saved(image, 6, "PNG"), 3)
    assert [turned.getpixel((0, y)) for y in (0, 1)] == [(255, 0, 0), (0, 0, 255)]


def transparent(mode):
    """Return an image with half-transparent black on the left and opaque black on the right."""
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
def test_unusual_modes_are_converted(name):
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
def test_unusual_files_are_read(tmp_path, mode, kind):
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
    if mode == "1":  # black and white dots with the same mean grey
        decoded, expected = decoded.mean(), expected.mean()
    assert np.mean(abs(decoded - expected)) < 4


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (2, 7), (500, 3), (37, 41), (300, 200)])
def test_unusual_sizes_are_resized(size):
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
    assert (turned[1:-1] == [0, 0, 255]).all()  # at the edge, neighbours outside of the square have an effect


def test_large_jpegs_are_shrunk_on_decoding_without_visible_loss():
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
