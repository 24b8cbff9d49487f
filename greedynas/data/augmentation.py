"""Stronger augmentation by timm: RandAugment and random erasing of single images, mixup and cutmix of batches.

timm draws from the global generators of Python, NumPy and torch. They are seeded for it from (seed, purpose, epoch,
sample) or (seed, purpose, epoch, batch), and restored afterwards, so that images depend neither on workers nor on
batches.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from greedynas.data.transforms import View, normalisation
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.rng import stream, uniforms

RANDAUGMENT = re.compile(r"rand(-(m\d+|n[1-9]|p(0?\.\d+|1)|mstd\d+(\.\d+)?|mmax[1-9]\d*|inc[01]|t(weights|3aw|3a)))*")


@contextmanager
def lent_generators(device: torch.device | None = None) -> Iterator[Callable[[int], None]]:
    """Provide a function that seeds the global generators of CPU and device; restore their states afterwards."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    gpus = [device] if device is not None and device.type == "cuda" else []

    def reseed(number: int) -> None:
        random.seed(number)
        np.random.seed([number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF])  # noqa: NPY002
        torch.default_generator.manual_seed(number)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(number)

    with torch.random.fork_rng(devices=gpus):
        try:
            yield reseed
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def seeded_generators(seed: int, purpose: str, *counters: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators from a stream of greedynas inside this context; restore their states afterwards."""
    with lent_generators(device) as reseed:
        reseed(int(stream(seed, purpose, *counters).integers(2**63)))
        yield


# Single images


def augment_more(view: View, pixels: Tensor, epoch: int, samples: NDArray[np.int64]) -> Tensor:
    """Return cropped images, uint8 (n, size, size, channels), after RandAugment and random erasing."""
    if view.randaugment is not None:
        transform = make_randaugment(view.randaugment, view.channels, view.size)
        images = pixels.numpy()
        with lent_generators() as reseed:
            augmented = [
                np.asarray(_with_seed(reseed, number, transform, _to_image(image))).reshape(image.shape)
                for number, image in zip(_seeds(view, "randaugment", epoch, samples), images, strict=True)
            ]
        pixels = torch.from_numpy(np.stack(augmented))
    if view.erasing > 0:
        erase = make_erasing(view.erasing)
        normalised = view.normalise(pixels)
        with lent_generators() as reseed:
            for number, image in zip(_seeds(view, "erasing", epoch, samples), normalised, strict=True):
                _with_seed(reseed, number, erase, image)  # in place
        pixels = view.pixels(normalised)
    return pixels


def check_randaugment(text: str | None) -> None:
    """Raise for a RandAugment setting that is not in timm's notation; timm itself ignores unknown parts."""
    if text is not None and not RANDAUGMENT.fullmatch(text):
        raise GreedyNASError(
            f"retrain.randaugment = {text!r} is not in timm's notation, such as rand-m9-mstd0.5 or rand-m7-n3-inc1"
        )


@cache
def make_randaugment(text: str, channels: int, size: int) -> Callable[[Image.Image], Image.Image]:
    """Return the RandAugment transform of timm's own training; areas moved in from outside have the mean colour."""
    from timm.data.auto_augment import rand_augment_transform

    check_randaugment(text)
    fill = tuple(round(255 * value) for value in normalisation(channels)[0])
    mean: Any = fill if channels > 1 else fill[0]
    transform = rand_augment_transform(text, {"translate_const": int(size * 0.45), "img_mean": mean})
    for op in transform.ops:
        if op.name.startswith("Posterize"):  # the strongest level has 0 bits, which newer versions of Pillow refuse
            op.level_fn = partial(_at_least_one_bit, op.level_fn)
    return transform


def _at_least_one_bit(level_to_bits: Callable[[float, Any], tuple[int]], level: float, options: Any) -> tuple[int]:
    return (max(1, *level_to_bits(level, options)),)


@cache
def make_erasing(probability: float) -> Callable[[Tensor], Tensor]:
    """Return random erasing of normalised images, with normal noise in every pixel: the default of timm's training."""
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(probability, mode="pixel", device="cpu")


def _seeds(view: View, purpose: str, epoch: int, samples: NDArray[np.int64]) -> list[int]:
    return [int(number) for number in uniforms(view.seed, purpose, epoch, samples, 1)[:, 0] * 2.0**53]


def _with_seed(reseed: Callable[[int], None], number: int, transform: Callable[[Any], Any], image: Any) -> Any:
    reseed(number)
    return transform(image)


def _to_image(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


# Batches

Mix = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def make_mixup(mixup: float, cutmix: float, num_classes: int, seed: int) -> Mix | None:
    """Return a function that mixes the images of a batch in pairs, or None if there is nothing to mix.

    It maps (images, labels, epoch, batch) to (images, shares of each class). A batch of odd size loses its last image.
    """
    if mixup == 0 and cutmix == 0:
        return None
    from timm.data.mixup import Mixup

    mixer = Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, label_smoothing=0.0, num_classes=num_classes)

    def mix(images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        even = len(images) // 2 * 2
        with seeded_generators(seed, "mixup", epoch, batch):
            return mixer(images[:even], labels[:even])

    return mix
