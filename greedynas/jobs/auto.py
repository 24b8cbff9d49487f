"""The preset `auto`: settings chosen for a user's images and machine, each with its reason.

Every choice is a rule of thumb that the user can override: a setting that is given by hand is kept, and the choices
that depend on it follow. `estimates.py` estimates how long the outcome takes on the machine, and can fit it into a
time.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from greedynas.data.transforms import crop_fraction
from greedynas.greedy.schedule import PAPER_RATIO
from greedynas.greedy.settings import TrainSettings
from greedynas.jobs.auto_base import TOO_LARGE, base_space, choose_adapting, choose_base_settings
from greedynas.jobs.choices import Choices, Effort
from greedynas.jobs.probe import Look, look_at
from greedynas.runtime.devices import choose_device
from greedynas.settings.loading import changed, resolve_key
from greedynas.settings.schema import AUTO, Asked, Config, extends
from greedynas.spaces.budget import Budget, short_count
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import Space, load_space, space_names

__all__ = ["AUTO", "auto_config"]

# Image sizes that suit each space. `fashion` is too narrow for larger ones (see also the note in pocket.yaml).
SMALL = (16, 20, 24, 28, 32, 36, 40)
SIZES = {
    "fashion": SMALL,
    "pocket": (48, 64, 80, 96, 112, 128),
    "macro": (*SMALL, 48, 56, 64),
    "mobilenet": (96, 128, 160, 192, 224),
    "mobilenet-se": (96, 128, 160, 192, 224),
    "shufflenet": (96, 128, 160, 192, 224),
}
UNKNOWN_SIDE = 64  # where the sizes of the images are unknown until all are read
MANY_IMAGES = 100_000  # enough to train the 13 ops in each layer of mobilenet-se
IMAGENET_LIKE = 500_000
IMBALANCED = 4  # smallest ratio of the largest to the smallest class that is treated as imbalance

# Number of filter images, and Kendall's τ-b between their ranking of paths and that of 1,000 images:
# benchmarks/records/filter-images-cpu2-2026-11-18
RELIABILITY = ((4, 0.16), (8, 0.36), (16, 0.44), (32, 0.55), (64, 0.64), (100, 0.70), (200, 0.78), (400, 0.85))
RANKED = 100  # filter images that a reliable ranking needs,
AFFORDABLE = 2.0  # unless filtering would then cost more than this many times the training
WARMUP = 0.25  # share of the steps without filtering

POCKET_CORE_MS = 3.0  # time of one core to train a network of pocket on an image of 64 px
CPU_HOURS = 1.0  # limit for a job of default length, kept by a smaller image size


SUPERNET = {"cpu": Effort(200_000, 10, 100), "gpu": Effort(5_000_000, 40, 200)}
RETRAINING = {"cpu": Effort(500_000, 20, 200), "gpu": Effort(15_000_000, 120, 300)}


def auto_config(
    changes: dict[str, Any],
    device: torch.device | None = None,
    budget: Budget | None = None,
    section: str = "train",
    largest: int | None = None,
    smallest: int | None = None,
) -> tuple[Config, list[str]]:
    """Return settings for the data that `changes["data.source"]` names, and a sentence for every choice that was made.

    `changes` are the user's settings by (dotted) key, which are kept. `largest` is the largest image size that the given
    time allows. Of several budgets, `budget` is the largest, and `smallest` is the lowest limit on multiply-adds. The same data, machine and arguments give the same settings.
    """
    by_hand = {".".join(resolve_key(key, section)): value for key, value in changes.items()}
    given = changed({"name": AUTO, "space": "fashion"}, by_hand, AUTO)  # refuses wrong values before images are read
    device = device or choose_device(given.device)
    look = look_at(given.data, given.seed)
    choices = Choices({key: _value(given, key) for key in by_hand})
    kind = "cpu" if device.type == "cpu" else "gpu"
    images = _choose_split(choices, look, kind)
    if (around := base_space(choices, look, kind, budget, largest, smallest)) is not None:
        space = around
        _choose_augmentation(choices, look, space, images)
        choose_base_settings(choices, look, space, kind, images, budget, _val_images(choices, look))
    else:
        space = _choose_space(choices, look, kind, images, budget, largest)
        _choose_augmentation(choices, look, space, images)
        _choose_training(choices, look, space, kind, images, device)
        _choose_retraining(choices, space, kind, images)
        if (teacher := choices.given.get("taught_by")) is not None:
            choose_adapting(choices, teacher, kind, images)
    config = changed({"name": AUTO}, {**choices.values, **by_hand, "space": space}, AUTO)
    asked = Asked(preset=AUTO, changes={key: by_hand[key] for key in by_hand if not extends(key)})
    config = config.model_copy(update={"asked": asked})
    return config, [f"your data: {look.describe()}", *choices.reasons]


def _value(config: Config, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _choose_split(choices: Choices, look: Look, kind: str) -> int:
    """Choose how many images are held out, and return the number that is left to train on."""
    rest = look.images
    if not look.own_test:
        fifth = min(max(round(0.2 * look.images), look.classes), 10_000)
        why = "the data has no test set, so a fifth of the images is held out for it (at most 10,000)"
        rest -= _count(choices.choose("data.test_images", max(fifth, look.classes), why), look.images)
    if look.own_val is None:
        wanted = max(rest // 10, min(500, rest // 5))
        most = 2_000 if kind == "cpu" else max(10_000, 50 * look.classes)
        why = "held out to compare networks: a tenth of the images, or up to a fifth of a small set"
        why += f"; more than {most:,} would only slow the search down" if wanted > most else ""
        val = choices.choose("data.val_images", max(min(wanted, most), look.classes), why)
        rest -= _count(val, look.images)
    return max(rest, 1)  # sets that are too small are refused when they are opened


def _count(size: int | float, images: int) -> int:
    return size if isinstance(size, int) else round(size * images)


def _val_images(choices: Choices, look: Look) -> int:
    if look.own_val is not None:
        return look.own_val
    return _count(choices.values.get("data.val_images", choices.given.get("data.val_images", 0)), look.images)


# Space and image size


def _choose_space(
    choices: Choices, look: Look, kind: str, images: int, budget: Budget | None, largest: int | None
) -> Space:
    """Choose the space and its image size and return the space, adapted to grey or colour images."""
    side = choices.given.get("image_size") or look.side or UNKNOWN_SIDE
    space: Space = choices.given.get("space") or _space_for(choices, look, kind, side, images)
    if space.name in space_names():  # a space of the user's own is kept as it is
        channels = 1 if look.grey else 3
        if channels != space.image_channels:
            what = "one channel, because your images are grey" if look.grey else "three channels, for colour images"
            choices.reasons.append(f"{space.name} is built with {what}")
        space = space.adapt(image_channels=channels)
    else:
        return space
    sizes = SIZES[space.name]
    enlarged = 2 if side < sizes[0] else 1.05
    fitting = [size for size in sizes if _stored(size) <= enlarged * side] or [sizes[0]]
    why = f"half of your images are at least {side} px on their shorter side"
    why += ", and enlarging images that small helps" if side < sizes[0] else ""
    why = "the sizes of your images are known only when all are read" if look.side is None else why
    if kind == "cpu":
        work = _cpu_images(choices, look, images)
        quick = [size for size in fitting if _cpu_hours(space.adapt(image_size=size), work) <= CPU_HOURS]
        quick = quick or [fitting[0]]
        why += (
            f"; a larger size would take {torch.get_num_threads()} CPU cores over an hour"
            if len(quick) < len(fitting)
            else ""
        )
        fitting = quick
    if largest is not None and largest < fitting[-1]:
        fitting = [size for size in fitting if size <= largest] or [fitting[0]]
        why += f"; {TOO_LARGE}"
    limit = None if budget is None else budget.max_macs
    if limit is not None:
        cheap = [size for size in fitting if 1.1 * space.adapt(image_size=size).cost_tables["macs"].range[0] <= limit]
        cheap = cheap or [fitting[0]]
        why += (
            f"; with a larger size, hardly any network has {short_count(limit)} multiply-adds"
            if len(cheap) < len(fitting)
            else ""
        )
        fitting = cheap
    space = space.adapt(image_size=choices.choose("image_size", fitting[-1], why))
    highest = space.cost_tables["macs"].range[1]
    if limit is not None and limit > highest:
        choices.reasons.append(
            f"your limit of {short_count(limit)} multiply-adds has no effect: the most expensive network of "
            f"{space.name} has {short_count(float(f'{highest:.3g}'))}"
        )
    return space


def _space_for(choices: Choices, look: Look, kind: str, side: int, images: int) -> Space:
    if kind == "cpu" and side < (40 if look.grey else 24):
        name, why = "fashion", "fast on a CPU, for images as small as yours"
    elif kind == "cpu":
        name, why = "pocket", "for photographs on a CPU"
    elif side < 72:
        name, why = "macro", "for small images on a GPU"
    elif images < MANY_IMAGES:
        name, why = "mobilenet", "the paper's space, for photographs on a GPU"
    else:
        name, why = "mobilenet-se", f"the paper's larger space, which {images:,} images can train"
    choices.reasons.append(f"space {name}: {why}")
    return load_space(name)


def _stored(size: int) -> float:
    """Return the side in pixels of the image that a network's input is cropped from, see `data.crop_fraction`."""
    return size / crop_fraction(size)


def _cpu_images(choices: Choices, look: Look, images: int) -> float:
    """Return the number of images that a job trains on, with the cost of filtering converted into images."""
    batch = choices.given.get("train.batch_size", _batch(images, "cpu"))
    epochs = choices.given.get("train.max_epochs", SUPERNET["cpu"].epochs(images))
    filtering = _filtering(choices, look, "cpu", images, batch, epochs)
    return images * (epochs * (1 + (1 - WARMUP) * filtering.cost) + RETRAINING["cpu"].epochs(images))


def _cpu_hours(space: Space, trained: float) -> float:
    """Return a rough estimate of the hours that a job takes on this CPU."""
    relative_cost = sum(space.cost_tables["macs"].range) / sum(load_space("pocket").cost_tables["macs"].range)
    return trained * POCKET_CORE_MS * relative_cost / torch.get_num_threads() / 3_600_000


def smaller_sizes(space: Space) -> list[int]:
    """Return the image sizes below that of a space which `auto` could have chosen, in ascending order."""
    sizes = space.sizes if space.base is not None else SIZES.get(space.name, ())
    return [size for size in sizes if size < space.image_size]


# Training


def _choose_augmentation(choices: Choices, look: Look, space: Space, images: int) -> None:
    if space.image_size <= 64:
        augment = choices.choose("data.augment", "pad_crop", "small images are shifted by a few pixels")
        if augment == "pad_crop":
            choices.choose("data.pad", max(1, space.image_size // 8), "")
    else:
        least = 0.08 if images >= MANY_IMAGES else 0.3
        why = f"random crops of the photographs, with at least {least:.0%} of their area"
        augment = choices.choose("data.augment", "resized_crop", why)
        if augment == "resized_crop":
            choices.choose("data.min_scale", least, "")
    if _reads_left_to_right(look):
        choices.choose("data.flip", False, "by their names, your classes change when mirrored")
    if look.most >= IMBALANCED * look.fewest:
        why = f"your largest class has {look.most / look.fewest:.0f} times the images of the smallest"
        choices.choose("data.class_weights", "balanced", why)


def _reads_left_to_right(look: Look) -> bool:
    """Return whether the class names suggest letters, digits (of grey images), or left and right."""
    names = [name.lower() for name in look.class_names]
    if any(re.search(r"(?<![a-z])(left|right)(?![a-z])", name) for name in names):
        return True
    return all(len(name) == 1 and (name.isalpha() or (name.isdigit() and look.grey)) for name in names)


def _most_in_a_batch(images: int, kind: str) -> int:
    return 64 if kind == "cpu" else 256 if images < IMAGENET_LIKE else 1024


def _batch(images: int, kind: str) -> int:
    return min(max(_power_of_two(images / 25), 8), _most_in_a_batch(images, kind))


def _choose_training(choices: Choices, look: Look, space: Space, kind: str, images: int, device: torch.device) -> None:
    most, batch = _most_in_a_batch(images, kind), _batch(images, kind)
    why = "for enough steps per epoch" if batch < most else f"suits a {kind.upper()}"
    fits = _largest_batch(space, device)
    if fits < batch:
        batch, why = fits, "a larger one might not fit into the memory of this GPU"
    batch = choices.choose("train.batch_size", batch, why)

    epochs = SUPERNET[kind].epochs(images)
    steps = max(1, images // batch)
    why = f"about {short_count(float(f'{epochs * images:.2g}'))} images to train on, {epochs * steps:,} steps"
    epochs = choices.choose("train.max_epochs", epochs, why)
    choices.choose("train.warmup", WARMUP, "")
    after_warmup = (1 - WARMUP) * epochs * steps
    k = choices.given.get("train.k", 5)
    pool = min(max(round(after_warmup / 40, -1), 10, k), 1000)
    pool = choices.choose("train.pool_size", int(pool), "small enough that many paths compete for every place in it")
    if steps < pool or pool < 25:
        why = f"a pool of {pool} with {steps} steps per epoch says little about when to stop, so all epochs are trained"
        choices.choose("train.stopping", False, why)

    filtering = _filtering(choices, look, kind, images, batch, epochs)
    filter_images = choices.choose("train.filter_images", filtering.images, filtering.why)
    choices.choose("train.bn_images", max(filter_images, 2), "")
    large = images >= IMAGENET_LIKE
    choices.choose("train.lr", 0.12 if large else round(0.1 * min(1, batch / 64), 4), "")
    choices.choose("train.weight_decay", 4e-5 if large else 1e-4 if kind == "cpu" else 5e-4, "")


@dataclass(frozen=True)
class Filtering:
    """The number of images that rank the paths of a filtering, and the cost of it."""

    images: int
    cost: float  # of filtering over that of training, after the warm-up
    why: str


def _filtering(choices: Choices, look: Look, kind: str, train_images: int, batch: int, epochs: int) -> Filtering:
    """Return the number of filter images that a reliable ranking needs, within a limit of cost.

    Half a batch is cheap. If this is less than one image of each class, or than RANKED, the number is raised, at most
    until filtering costs AFFORDABLE times the training. The limit is higher for a data set that is so small that
    training and filtering together still take less than a training of the usual length.
    """
    settings = TrainSettings()
    paths = choices.given.get("train.m", settings.m) / choices.given.get("train.k", settings.k)
    cost = paths / batch / PAPER_RATIO  # of one filter image, over that of a training step
    trained = epochs * max(1, train_images // batch) * batch
    limit = max(AFFORDABLE, (SUPERNET[kind].images - trained) / trained / (1 - WARMUP))
    half = max(batch // 2, 2)
    wanted, why = half, "half a batch"
    if wanted < min(look.classes, batch):
        wanted = min(look.classes, batch)
        why = "one of each class" if wanted == look.classes else f"a batch, because there are {look.classes:,} classes"
    if wanted < RANKED:
        wanted, why = RANKED, "with fewer, the ranking of paths is too unreliable"
    if wanted > max(affordable := int(limit / cost), half):
        wanted, why = max(affordable, half), f"more would cost over {limit:.2g} times the training"
    if wanted >= (val := _val_images(choices, look)):
        wanted, why = val, "all validation images"
    why += (
        f"; rankings by {wanted:,} and by 1,000 images agree with a τ-b of about {_reliability(wanted):.2f}, "
        f"and filtering costs {_times(wanted * cost)} the training after the warm-up"
    )
    return Filtering(wanted, wanted * cost, why)


def _reliability(images: int) -> float:
    counts, taus = zip(*RELIABILITY, strict=True)
    return float(np.interp(math.log(max(images, 1)), np.log(counts), taus))


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio >= 0.95 else f"{ratio:.0%} of"


def _choose_retraining(choices: Choices, space: Space, kind: str, images: int) -> None:
    effort = RETRAINING[kind]
    epochs = effort.epochs(images)
    why = f"about {short_count(float(f'{epochs * images:.2g}'))} images from scratch"
    epochs = choices.choose("retrain.epochs", epochs, why)
    has_se = any("_SE" in op for layer in space.layers for op in layer.ops)
    if has_se and epochs >= 200:
        recipe = choices.choose("retrain.recipe", "rmsprop", "the paper's for networks with SE")
    else:
        why = "its learning rate ends at 0 in any number of epochs" if has_se else "the paper's for networks without SE"
        recipe = choices.choose("retrain.recipe", "sgd", why)
    batch = choices.given.get("train.batch_size", choices.values.get("train.batch_size"))
    choices.choose("retrain.batch_size", batch, "")
    if recipe == "sgd" and images < IMAGENET_LIKE:
        choices.choose(
            "retrain.lr",
            0.2,
            "at a batch size of 256, to which it is proportional; the recipe's 0.05 is for a million images",
        )


def _power_of_two(number: float) -> int:
    """Return the largest power of two that is at most `number`, and at least 1."""
    return 2 ** int(math.log2(max(number, 1)))


def _largest_batch(space: Space, device: torch.device) -> int:
    """Return the largest batch size whose activations fit into two thirds of a GPU's memory.

    For every image, training of the most expensive path keeps the input and the output of each normalisation, in bf16.
    """
    if device.type != "cuda":
        return 2**20
    kept = 0
    for layer in (*space.stem_layers, *space.layers, *space.head_layers):
        hidden = max(parse_op(op).hidden(layer.in_channels) for op in layer.ops)
        kept += 2 * hidden * (layer.in_size**2 + layer.out_size**2) + 2 * layer.out_channels * layer.out_size**2
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(_power_of_two(memory / 1.5 / (2 * kept)), 2)
