"""Test helpers shared by `tests.data.test_transforms` and others."""

import io

from PIL import Image


def exif_saved(image, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(
        file, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {})
    )
    file.seek(0)
    return Image.open(file)
