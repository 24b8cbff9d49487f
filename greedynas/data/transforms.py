"""From image files to the input of networks: decoding, cropping, augmentation, normalisation.

Decoded pixels are uint8 with the channels last, (n, side, side, channels): a crop is then one gather of whole pixels, and
the batch that `View.normalise` returns is in torch's channels_last format without a copy.
"""

import errno
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from greedynas.gpu import engine
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import uniforms

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.float64]

# timm's IMAGENET_DEFAULT_MEAN and _STD, written out because importing timm.data takes seconds.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

WHOLE_UP_TO = 64  # pixels of an input; larger inputs are the centre of a larger square
ATTEMPTS = 10  # to find a crop that lies within the image, as in torchvision's RandomResizedCrop
ASPECTS = (3 / 4, 4 / 3)
LONGEST = 3  # times the shorter side: longer images are cut to their centre, else a few would fill the memory

_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Unreadable(Exception):
    """An error for a file that is not an image, or is broken. The message is the reason, in one line."""


def normalisation(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel for pixels in [0, 1]: ImageNet's, averaged for grey images."""
    if channels == 3:
        return MEAN, STD
    if channels == 1:
        return (sum(MEAN) / 3,), (sum(STD) / 3,)
    raise GreedyNASError(f"images have 1 (grey) or 3 (RGB) channels, not {channels}: change the space's image_channels")


# Decoding

# The formats that Pillow may decode, whatever the file is called; not EPS, for example, which would start another
# program.
JPEG = ("JPEG", "MPO")
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")

# A small file can hold a huge picture. Pillow refuses images of over 179 million pixels; this limits bytes, before
# decoding, to 67 million pixels in colour. Rotating an image upright and removing its transparency take up to four
# times as much.
MAX_DECODED = 2**28
_PIXEL_BYTES = {
    "1": 1,
    "L": 1,
    "P": 1,
    "I;16": 2,
    "I;16L": 2,
    "I;16B": 2,
    "I;16N": 2,
}  # in Pillow's memory; others have 4
_WORKING_BYTES = {"JPEG2000": 4, "WEBP": 1, "AVIF": 1}  # additional memory of the decoder, in bytes per pixel of a band
_TILE = 2**20  # pixels that are converted to 8 bits at a time


def open_image(file: Path | IO[bytes]) -> Image.Image:
    """Return the image of a file or its content, not decoded yet; refuse pipes and devices, which may never end."""
    if isinstance(file, Path) and refuse_irregular(file).st_size == 0:
        # This includes files that the system generates on reading, such as /proc/kmsg, which blocks forever.
        raise OSError(errno.ENODATA, "cannot identify image file: it is empty")
    Image.init()
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def refuse_irregular(file: Path | bytes) -> os.stat_result:
    """Raise OSError for pipes, devices, sockets and folders, also behind a link, which might never end."""
    status = os.stat(file)  # noqa: PTH116
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file but a pipe, a device, a socket or a folder")
    return status


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Return an image in 8-bit grey (1 channel, mode L) or RGB (3): upright, transparency on white, 16 bits scaled."""
    normalisation(channels)  # raises for other numbers of channels
    refuse_large(decoded_bytes(image))
    image.load()
    image = _upright(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    elif image.mode == "LAB":
        image = _lab_to_rgb(image)
    elif image.has_transparency_data:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    wanted = "L" if channels == 1 else "RGB"
    image = image if image.mode == wanted else image.convert(wanted)  # convert always makes a copy
    image.info = {}  # so that it is not rotated a second time
    return image


def decoded_bytes(image: Image.Image) -> int:
    """Return the memory that decoding an image will need, from its header."""
    pixel = _PIXEL_BYTES.get(image.mode, 4) + _WORKING_BYTES.get(image.format or "", 0) * len(image.getbands())
    return image.width * image.height * pixel


def refuse_large(size: int) -> None:
    """Raise Unreadable for an image that needs more memory than `MAX_DECODED`."""
    if size > MAX_DECODED:
        raise Unreadable(
            f"decoding it takes {size / 1e6:,.0f} MB, more than the {MAX_DECODED / 1e6:,.0f} MB allowed; make it smaller"
        )


def square(image: Image.Image, channels: int, side: int) -> Pixels:
    """Return the largest centred square of an image, resized: (side, side, channels).

    This equals resizing the shorter side and cropping the centre, but an image of 1 × 10,000 pixels does not become one
    of side × 10,000 · side.
    """
    image = _decode(image, channels, shrink=_shrink(image.size, side))
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    return resized(image, side, (left, top, left + shorter, top + shorter))


def random_crop(image: Image.Image, channels: int, side: int, numbers: Numbers, min_scale: float) -> Pixels:
    """Return a random area of the whole image, cut at its own resolution and resized: (side, side, channels)."""
    image, (width, height) = upright_size(image, channels)
    left, top, right, bottom = seen_part(width, height)
    across, down = right - left, bottom - top
    x, y, w, h = crop_boxes(numbers[None], np.array([across / down]), min_scale)[0]
    image = _decode(image, channels, shrink=int(min(w * across, h * down)) // (2 * side))
    wider, higher = image.width / width, image.height / height  # below 1 if the image was decoded at a smaller size
    box = ((left + x * across) * wider, (top + y * down) * higher)
    return resized(image, side, (*box, (left + (x + w) * across) * wider, (top + (y + h) * down) * higher))


def whole(image: Image.Image, channels: int, side: int) -> tuple[Pixels, float]:
    """Return the part of an image that crops are taken from, and its width over its height in the file.

    The part is (height, width, channels) with a shorter side of at most `side`. Smaller images are not resized.
    """
    image, size = upright_size(image, channels)
    return _whole(_decode(image, channels, _shrink(size, side)), size, side)


def square_and_whole(image: Image.Image, channels: int, side: int, larger: int) -> tuple[Pixels, Pixels, float]:
    """Return the results of `square` and `whole` for an image that is `decoded_alike` for them, decoded once."""
    image, size = upright_size(image, channels)
    image = _decode(image, channels, _shrink(size, larger))
    return square(image, channels, side), *_whole(image, size, larger)


def _whole(image: Image.Image, original: tuple[int, int], side: int) -> tuple[Pixels, float]:
    """Return the same as `whole` for a decoded image, which may be smaller than its `original` size in the file."""
    left, top, right, bottom = seen_part(*original)
    size = whole_size(*original, side)
    if size != (right - left, bottom - top):
        across, down = image.width / original[0], image.height / original[1]
        box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
        image = image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=3.0)
    elif size != image.size:
        image = image.crop((left, top, right, bottom))
    return np.asarray(image).reshape(size[1], size[0], -1), (right - left) / (bottom - top)


def whole_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Return the width and the height of the result of `whole` for an image."""
    left, top, right, bottom = seen_part(width, height)
    across, down = right - left, bottom - top
    scale = min(1.0, side / min(across, down))
    return max(1, round(across * scale)), max(1, round(down * scale))


def seen_part(width: int, height: int) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) that crops are from: the image, or the centre of a very long one."""
    across, down = min(width, LONGEST * height), min(height, LONGEST * width)
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def upright_size(image: Image.Image, channels: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return the image and its upright size; images other than JPEGs are decoded for that."""
    if image.format not in JPEG:
        image = to_channels(image, channels)
        return image, image.size
    return image, (image.height, image.width) if _orientation(image) >= 5 else image.size


def decoded_alike(image: Image.Image, side: int, other: int) -> bool:
    """Return whether `square` and `whole` decode the same pixels for these sides, so that one decoding is enough."""
    return len({_jpeg_scale(image, _shrink(image.size, wanted)) for wanted in (side, other)}) == 1


def _shrink(size: tuple[int, int], side: int) -> int:
    """Return the largest factor by which an image may be shrunk on decoding, before it is resized to `side`."""
    return min(size) // (2 * side)


def _jpeg_scale(image: Image.Image, shrink: int) -> int:
    """Return the factor by which Pillow's `draft` shrinks an image on decoding: 1, 2, 4 or 8."""
    if image.format not in JPEG or shrink < 2:
        return 1
    scale = min(image.width // max(1, image.width // shrink), image.height // max(1, image.height // shrink))
    return next(possible for possible in (8, 4, 2, 1) if scale >= possible)


def _decode(image: Image.Image, channels: int, shrink: int) -> Image.Image:
    """Return the decoded image; a JPEG may become smaller by up to a factor `shrink`, which makes decoding faster."""
    if "progressive" in image.info:
        refuse_large(_coefficient_bytes(image))
    if shrink > 1:
        image.draft(None, (max(1, image.width // shrink), max(1, image.height // shrink)))
    return to_channels(image, channels)


def _coefficient_bytes(image: Image.Image) -> int:
    """Return the bytes of a progressive JPEG's coefficients, two each, kept whatever the size of the result."""
    layers = getattr(image, "layer", ())  # (name, samples across, samples down, table) of each band
    samples = [layer[1] * layer[2] for layer in layers]
    share = sum(samples) / max(1, *samples) if samples else len(image.getbands())
    return round(2 * image.width * image.height * share)


def resized(image: Image.Image, side: int, box: tuple[float, float, float, float]) -> Pixels:
    """Return a box (left, top, right, bottom) of an image, in its pixels, resized: (side, side, channels)."""
    left, top, right, bottom = box
    box = (max(left, 0.0), max(top, 0.0), min(right, float(image.width)), min(bottom, float(image.height)))
    if image.size != (side, side) or box != (0.0, 0.0, side, side):
        image = image.resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
    return np.asarray(image).reshape(side, side, -1)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
        return value if isinstance(value, int) else 1
    except Exception:  # malformed EXIF data raises various errors; the picture itself is fine
        return 1


def _upright(image: Image.Image) -> Image.Image:
    method = _UPRIGHT.get(_orientation(image))
    return image if method is None else image.transpose(method)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits: 16 bits scaled by their full range, floats taken as [0, 1] or [0, 255].

    Values outside of these ranges are scaled from the smallest to the largest one. The image is converted in tiles: in
    float64, the whole would need several times eight times the memory of the result.
    """
    extremes = [(float(values.min()), float(values.max())) for _, values in _tiles(image)]
    low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
    tops = (1.0, 255.0) if image.mode == "F" else (65535.0,)
    top = next((top for top in tops if low >= 0 and high <= top), None)
    shift = low if top is None else 0.0
    scale = 255 / (top or (high - low) or 1.0)
    result = Image.new("L", image.size)
    for corner, values in _tiles(image):
        result.paste(Image.fromarray(np.rint((values - shift) * scale).astype(np.uint8)), corner)
    return result


def _tiles(image: Image.Image) -> Iterator[tuple[tuple[int, int], Numbers]]:
    """Yield the values of an image in tiles, each with its upper left corner; values that are not finite become 0."""
    width = min(image.width, _TILE)
    height = max(1, _TILE // width)
    for top in range(0, image.height, height):
        for left in range(0, image.width, width):
            box = (left, top, min(left + width, image.width), min(top + height, image.height))
            values = np.asarray(image.crop(box)).astype(np.float64)
            yield (left, top), np.nan_to_num(values, posinf=0, neginf=0)


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, rgb, "LAB", "RGB"))
    assert converted is not None  # it is None only when it converts in place
    return converted


GONE = "it has disappeared since the run started"


def reason(error: Exception) -> str:
    """Return why an image cannot be read, in one line; raise errors of the machine, not of the file, again."""
    if (
        isinstance(error, FileNotFoundError) and not Path(os.fsdecode(error.filename or "")).is_symlink()
    ):  # a broken link is no such case
        return GONE
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
    return "no image in a known format" if text.startswith("cannot identify image file") else text


# Augmentation


def crop_boxes(numbers: Numbers, aspects: Numbers, min_scale: float) -> Numbers:
    """Return random areas of images with these aspects (width / height): (n, 4), x, y, w, h as fractions.

    This follows torchvision's RandomResizedCrop: area in [min_scale, 1], aspect in [3/4, 4/3] (log-uniform), ten
    attempts, else the largest centred crop with an allowed aspect. Every image uses 2 · ATTEMPTS + 2 numbers.
    """
    area = min_scale + (1 - min_scale) * numbers[:, :ATTEMPTS]
    log_low, log_high = math.log(ASPECTS[0]), math.log(ASPECTS[1])
    aspect = np.exp(log_low + (log_high - log_low) * numbers[:, ATTEMPTS : 2 * ATTEMPTS])
    w, h = np.sqrt(area * aspect / aspects[:, None]), np.sqrt(area / aspect * aspects[:, None])
    fits = (w <= 1) & (h <= 1)
    first, some, rows = fits.argmax(axis=1), np.asarray(fits.any(axis=1)), np.arange(len(numbers))
    nearest = np.clip(aspects, *ASPECTS)
    w = np.where(some, w[rows, first], np.minimum(nearest / aspects, 1))
    h = np.where(some, h[rows, first], np.minimum(aspects / nearest, 1))
    position = np.where(some[:, None], numbers[:, 2 * ATTEMPTS : 2 * ATTEMPTS + 2], 0.5)
    return np.stack([position[:, 0] * (1 - w), position[:, 1] * (1 - h), w, h], axis=1)


@dataclass(frozen=True)
class View:
    """The preprocessing and augmentation of a set of images. It is plain data that can be sent to worker processes."""

    size: int  # of the network's input
    stored: int  # side of the squares that are kept; evaluation uses their centre
    channels: int
    augment: Literal["none", "pad_crop", "resized_crop"]
    pad: int
    min_scale: float
    flip: bool
    seed: int
    # For retraining, by `augmentation.augment_more`
    randaugment: str | None = None  # timm's notation
    erasing: float = 0.0  # probability of random erasing
    mean: tuple[float, ...] | None = None  # of normalisation; None: ImageNet's
    std: tuple[float, ...] | None = None
    crop_fraction: float | None = None  # the setting; None: that of the size

    def at_size(self, size: int) -> "View":
        """Return the same view for networks of another input size."""
        return replace(self, size=size, stored=stored_side(size, self.crop_fraction))

    @property
    def more(self) -> bool:
        """Whether images are augmented by more than crops and flips."""
        return self.randaugment is not None or self.erasing > 0

    def numbers(self, epoch: int, samples: NDArray[np.int64]) -> Numbers:
        """Return the random numbers of the samples' augmentation in an epoch: (n, count), the last one for the flip."""
        count = {"none": 1, "pad_crop": 3, "resized_crop": 2 * ATTEMPTS + 3}[self.augment]
        return uniforms(self.seed, "augment", epoch, samples, count)

    @property
    def whole(self) -> int:
        """The shorter side of the images in memory that crops are taken from.

        The smallest crop then has as many pixels as the network's input.
        """
        return max(self.stored, math.ceil(self.size / math.sqrt(self.min_scale)))

    def plan(self, epoch: int, samples: NDArray[np.int64]) -> Tensor:
        """Return the crop and the flip of each sample in an epoch, for `augmented`: (n, 3) top, left, flip."""
        chunks = [self._plan(self.numbers(epoch, chunk)) for chunk in in_chunks(samples)]
        return torch.from_numpy(np.concatenate(chunks))

    def crop_plan(self, epoch: int, samples: NDArray[np.int64], aspects: Numbers) -> Numbers:
        """Return the random crop of each sample in an epoch: (n, 5) box as fractions of the image, flip."""
        plans = []
        for chunk, some in zip(in_chunks(samples), in_chunks(aspects), strict=True):
            numbers = self.numbers(epoch, chunk)
            boxes = crop_boxes(numbers, some, self.min_scale)
            plans.append(np.concatenate([boxes, self.flips(numbers)[:, None]], axis=1))
        return np.concatenate(plans)

    def _plan(self, numbers: Numbers) -> NDArray[np.int64]:
        flips = self.flips(numbers)[:, None]
        if self.augment == "pad_crop":
            corners = np.floor(numbers[:, :2] * (self.stored - self.size + 2 * self.pad + 1)) - self.pad
        else:
            corners = np.full((len(numbers), 2), self._margin)
        return np.concatenate([corners, flips], axis=1).astype(np.int64)

    def flips(self, numbers: Numbers) -> NDArray[np.bool_]:
        chance = 0.5 if self.flip and self.augment != "none" else 0.0
        return np.asarray(numbers[:, -1] < chance)

    def augmented(self, pixels: Tensor, rows: Tensor, plan: Tensor) -> Tensor:
        """Return rows of stored squares, cropped and flipped by their plan: (n, size, size, channels), 0 to 255.

        Crops may extend over the edge, where pixels are 0. The batch takes one gather.
        """
        top, left, flip = plan[:, :, None].unbind(1)  # each (n, 1)
        steps = torch.arange(self.size, device=pixels.device)
        y = top + steps
        x = left + torch.where(flip > 0, self.size - 1 - steps, steps)
        inside = ((y >= 0) & (y < self.stored))[:, :, None] & ((x >= 0) & (x < self.stored))[:, None, :]
        y, x = y.clamp_(0, self.stored - 1), x.clamp_(0, self.stored - 1)
        return pixels[rows[:, None, None], y[:, :, None], x[:, None, :]].mul_(inside[..., None])

    def batch(self, pixels: Tensor, rows: Tensor, plan: Tensor) -> Tensor:
        """Return rows of stored squares, augmented and normalised: float32 (n, channels, size, size), channels_last."""
        if pixels.is_cuda and engine.mode() != "off" and engine.has_triton():
            from greedynas.gpu.kernels.small import crops  # one kernel instead of fifteen

            numbers = _scale_and_shift(*self.normalisation, pixels.device)
            return crops(pixels, rows, plan, self.size, *numbers).permute(0, 3, 1, 2)
        return self.normalise(self.augmented(pixels, rows, plan))

    def centre(self, pixels: Tensor) -> Tensor:
        """Return the centre of stored squares, which evaluation uses: (n, size, size, channels)."""
        return centre(pixels, self.size)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return pixels 0 to 255 (channels last) as normalised float32 (n, channels, size, size), channels_last."""
        return normalised(pixels, *self.normalisation)

    def pixels(self, images: Tensor) -> Tensor:
        """Return normalised images as the nearest uint8 pixels: (n, size, size, channels)."""
        return denormalised(images, *self.normalisation)

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and the standard deviation of each channel."""
        mean, std = normalisation(self.channels)
        return self.mean or mean, self.std or std

    @property
    def _margin(self) -> int:
        return (self.stored - self.size) // 2


def crop_fraction(size: int) -> float:
    """Return the fraction of a stored square's side that evaluation uses: all of it for small images."""
    return 1.0 if size <= WHOLE_UP_TO else 0.875


def stored_side(size: int, fraction: float | None = None) -> int:
    """Return the side of the squares that are kept for networks of this input size."""
    return round(size / (fraction or crop_fraction(size)))


def centre(pixels: Tensor, size: int) -> Tensor:
    """Return the central size x size pixels of squares (n, side, side, channels)."""
    margin = (pixels.shape[1] - size) // 2
    return pixels[:, margin : margin + size, margin : margin + size]


def normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return pixels from 0 to 255 (n, h, w, channels) as normalised float32 (n, channels, h, w), channels_last."""
    scale, shift = _scale_and_shift(mean, std, pixels.device)
    return pixels.float().mul_(scale).add_(shift).permute(0, 3, 1, 2)


def in_chunks(values: NDArray[Any], size: int = 65536) -> list[NDArray[Any]]:
    """Return the values in order, in chunks of at most this size, because results may need much more memory."""
    return np.split(values, range(size, len(values), size))


def denormalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return normalised images as the nearest uint8 pixels: (n, channels, size, size) -> (n, size, size, channels)."""
    scale, shift = _scale_and_shift(mean, std, images.device)
    pixels = (images.permute(0, 2, 3, 1) - shift) / scale
    return pixels.round().clamp(0, 255).to(torch.uint8)


@cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return normalisation as one multiplication and one addition on pixels from 0 to 255."""
    means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
    return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)
