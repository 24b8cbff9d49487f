"""The preset `auto`: settings for somebody's own images, chosen by a look at them and at the machine, each with its reason.

Everything here is a rule of thumb that a person can read, and override: what is set by hand wins, and the choices that
depend on it follow. `planning.py` measures what the outcome takes on the machine, and can fit it into a time.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from greedynas.data.transforms import crop_fraction
from greedynas.greedy.schedule import PAPER_RATIO
from greedynas.greedy.settings import TrainSettings
from greedynas.jobs.probe import Look, look_at
from greedynas.runtime.devices import choose_device
from greedynas.settings.loading import changed, resolve_key
from greedynas.settings.schema import AUTO, Asked, Config, extends
from greedynas.spaces.budget import Budget, told_count
from greedynas.spaces.ops import parse_op
from greedynas.spaces.space import Space, load_space, space_names

__all__ = ["AUTO", "auto_config"]

# Image sizes that each space is good for. `fashion` is too narrow for more (and see the note in pocket.yaml).
SMALL = (16, 20, 24, 28, 32, 36, 40)
SIZES = {
    "fashion": SMALL,
    "pocket": (48, 64, 80, 96, 112, 128),
    "macro": (*SMALL, 48, 56, 64),
    "mobilenet": (96, 128, 160, 192, 224),
    "mobilenet-se": (96, 128, 160, 192, 224),
    "shufflenet": (96, 128, 160, 192, 224),
}
UNKNOWN_SIDE = 64  # where images tell their sizes only when all are read
MANY_IMAGES = 100_000  # enough to train the 13 ops a layer of mobilenet-se
IMAGENET_LIKE = 500_000
IMBALANCED = 4  # times as many images in the largest class as in the smallest

# Images that rank paths in a filtering, and Kendall's τ-b of their ranking with that of 1,000:
# benchmarks/records/filter-images-cpu2-2026-11-18
RELIABILITY = ((4, 0.16), (8, 0.36), (16, 0.44), (32, 0.55), (64, 0.64), (100, 0.70), (200, 0.78), (400, 0.85))
RANKED = 100  # filter images that a ranking should have,
AFFORDABLE = 2.0  # as long as filtering costs no more than this many times the training
WARMUP = 0.25  # share of the steps without filtering

POCKET_CORE_MS = 3.0  # for a core to train a network of pocket on an image of 64 px
CPU_HOURS = 1.0  # what a job of default length should stay under; a smaller image size sees to it


@dataclass(frozen=True)
class Effort:
    """How long to train: about so many images, within these epochs."""

    images: int
    fewest: int
    most: int

    def epochs(self, train_images: int) -> int:
        return min(max(math.ceil(self.images / train_images), self.fewest), self.most)


SUPERNET = {"cpu": Effort(200_000, 10, 100), "gpu": Effort(5_000_000, 40, 200)}
RETRAINING = {"cpu": Effort(500_000, 20, 200), "gpu": Effort(15_000_000, 120, 300)}


@dataclass
class Choices:
    """Values by dotted key, with reasons. What was given by hand is taken as it is."""

    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def choose(self, key: str, value: Any, why: str) -> Any:
        """The value that will be used. Without a reason it follows from another choice and is not told."""
        if key in self.given:
            return self.given[key]
        self.values[key] = value
        if why:
            told = f"{value:,}" if type(value) is int else str(value).lower()
            self.reasons.append(f"{key} {told}: {why}")
        return value


def auto_config(
    changes: dict[str, Any],
    device: torch.device | None = None,
    budget: Budget | None = None,
    section: str = "train",
) -> tuple[Config, list[str]]:
    """Settings for the data that `changes["data.source"]` names, and a sentence for every choice that was made.

    `changes` are what the user set, by (dotted) key; they win. The same data, machine and changes give the same settings.
    """
    by_hand = {".".join(resolve_key(key, section)): value for key, value in changes.items()}
    told = changed({"name": AUTO, "space": "fashion"}, by_hand, AUTO)  # wrong values are refused before a look
    device = device or choose_device(told.device)
    look = look_at(told.data, told.seed)
    choices = Choices({key: _value(told, key) for key in by_hand})
    kind = "cpu" if device.type == "cpu" else "gpu"
    images = _choose_split(choices, look, kind)
    space = _choose_space(choices, look, kind, images, budget)
    _choose_augmentation(choices, look, space, images)
    _choose_training(choices, look, space, kind, images, device)
    _choose_retraining(choices, space, kind, images)
    config = changed({"name": AUTO}, {**choices.values, **by_hand, "space": space}, AUTO)
    asked = Asked(preset=AUTO, changes={key: by_hand[key] for key in by_hand if not extends(key)})
    config = config.model_copy(update={"asked": asked})
    return config, [f"your data: {look.told()}", *choices.reasons]


def _value(config: Config, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _choose_split(choices: Choices, look: Look, kind: str) -> int:
    """What is held out; returns how many images are left to train on."""
    rest = look.images
    if not look.own_test:
        fifth = min(max(round(0.2 * look.images), look.classes), 10_000)
        why = "there is no test set, a fifth of the images is held out for it (at most 10,000)"
        rest -= _count(choices.choose("data.test_images", max(fifth, look.classes), why), look.images)
    if look.own_val is None:
        wanted = max(rest // 10, min(500, rest // 5))
        most = 2_000 if kind == "cpu" else max(10_000, 50 * look.classes)
        why = "held out to compare networks on: a tenth, of small sets up to a fifth"
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


def _choose_space(choices: Choices, look: Look, kind: str, images: int, budget: Budget | None) -> Space:
    """The space at its image size, for grey or coloured images."""
    side = choices.given.get("image_size") or look.side or UNKNOWN_SIDE
    space: Space = choices.given.get("space") or _space_for(choices, look, kind, side, images)
    if space.name in space_names():  # somebody's own file says what it wants
        channels = 1 if look.grey else 3
        if channels != space.image_channels:
            what = "one channel, your images have no colours" if look.grey else "three channels, for colours"
            choices.reasons.append(f"{space.name} is built with {what}")
        space = space.adapt(image_channels=channels)
    else:
        return space
    sizes = SIZES[space.name]
    enlarged = 2 if side < sizes[0] else 1.05
    fitting = [size for size in sizes if _stored(size) <= enlarged * side] or [sizes[0]]
    why = f"half of your images are at least {side} px on their shorter side"
    why += ", and enlarging such small ones helps" if side < sizes[0] else ""
    why = "the sizes of your images are known only when all are read" if look.side is None else why
    if kind == "cpu":
        work = _cpu_images(choices, look, images)
        quick = [size for size in fitting if _cpu_hours(space.adapt(image_size=size), work) <= CPU_HOURS]
        quick = quick or [fitting[0]]
        why += (
            f"; more would take {torch.get_num_threads()} CPU cores over an hour" if len(quick) < len(fitting) else ""
        )
        fitting = quick
    limit = None if budget is None else budget.max_macs
    if limit is not None:
        cheap = [size for size in fitting if 1.1 * space.adapt(image_size=size).cost_tables["macs"].range[0] <= limit]
        cheap = cheap or [fitting[0]]
        why += (
            f"; with more, hardly a network has {told_count(limit)} multiply-adds" if len(cheap) < len(fitting) else ""
        )
        fitting = cheap
    space = space.adapt(image_size=choices.choose("image_size", fitting[-1], why))
    dearest = space.cost_tables["macs"].range[1]
    if limit is not None and limit > dearest:
        choices.reasons.append(
            f"your limit of {told_count(limit)} multiply-adds is no limit here: the dearest network of {space.name} has "
            f"{told_count(float(f'{dearest:.3g}'))}"
        )
    return space


def _space_for(choices: Choices, look: Look, kind: str, side: int, images: int) -> Space:
    if kind == "cpu" and side < (40 if look.grey else 24):
        name, why = "fashion", "quick on a CPU, for images as small as yours"
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
    """Pixels that a network's input is cut out of, see `data.crop_fraction`."""
    return size / crop_fraction(size)


def _cpu_images(choices: Choices, look: Look, images: int) -> float:
    """Return the images that a job trains on, with the cost of filtering counted as images."""
    batch = choices.given.get("train.batch_size", _batch(images, "cpu"))
    epochs = choices.given.get("train.max_epochs", SUPERNET["cpu"].epochs(images))
    filtering = _filtering(choices, look, "cpu", images, batch, epochs)
    return images * (epochs * (1 + (1 - WARMUP) * filtering.cost) + RETRAINING["cpu"].epochs(images))


def _cpu_hours(space: Space, trained: float) -> float:
    """What a job takes on this CPU, very roughly."""
    dearer = sum(space.cost_tables["macs"].range) / sum(load_space("pocket").cost_tables["macs"].range)
    return trained * POCKET_CORE_MS * dearer / torch.get_num_threads() / 3_600_000


# Training


def _choose_augmentation(choices: Choices, look: Look, space: Space, images: int) -> None:
    if space.image_size <= 64:
        augment = choices.choose("data.augment", "pad_crop", "small images are shifted by a few pixels")
        if augment == "pad_crop":
            choices.choose("data.pad", max(1, space.image_size // 8), "")
    else:
        least = 0.08 if images >= MANY_IMAGES else 0.3
        why = f"random parts of the photographs, of {least:.0%} of their area or more"
        augment = choices.choose("data.augment", "resized_crop", why)
        if augment == "resized_crop":
            choices.choose("data.min_scale", least, "")
    if _reads_left_to_right(look):
        choices.choose("data.flip", False, "classes with such names are not the same in a mirror")
    if look.most >= IMBALANCED * look.fewest:
        why = f"your largest class has {look.most / look.fewest:.0f} times the images of the smallest"
        choices.choose("data.class_weights", "balanced", why)


def _reads_left_to_right(look: Look) -> bool:
    """Letters, the digits of grey images, or something on the left and on the right."""
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
    why = "enough steps an epoch" if batch < most else f"what a {kind.upper()} works well with"
    fits = _largest_batch(space, device)
    if fits < batch:
        batch, why = fits, "more might not fit into the memory of this GPU"
    batch = choices.choose("train.batch_size", batch, why)

    epochs = SUPERNET[kind].epochs(images)
    steps = max(1, images // batch)
    why = f"about {told_count(float(f'{epochs * images:.2g}'))} images to train on, {epochs * steps:,} steps"
    epochs = choices.choose("train.max_epochs", epochs, why)
    choices.choose("train.warmup", WARMUP, "")
    after_warmup = (1 - WARMUP) * epochs * steps
    k = choices.given.get("train.k", 5)
    pool = min(max(round(after_warmup / 40, -1), 10, k), 1000)
    pool = choices.choose("train.pool_size", int(pool), "so that every place in the pool is competed for many times")
    if steps < pool or pool < 25:
        why = f"a pool of {pool} after epochs of {steps} steps says little about when to stop, so all are trained"
        choices.choose("train.stopping", False, why)

    filtering = _filtering(choices, look, kind, images, batch, epochs)
    filter_images = choices.choose("train.filter_images", filtering.images, filtering.why)
    choices.choose("train.bn_images", max(filter_images, 2), "")
    large = images >= IMAGENET_LIKE
    choices.choose("train.lr", 0.12 if large else round(0.1 * min(1, batch / 64), 4), "")
    choices.choose("train.weight_decay", 4e-5 if large else 1e-4 if kind == "cpu" else 5e-4, "")


@dataclass(frozen=True)
class Filtering:
    """How many images rank the paths of a filtering, and what that costs."""

    images: int
    cost: float  # of filtering over that of training, after the warm-up
    why: str


def _filtering(choices: Choices, look: Look, kind: str, train_images: int, batch: int, epochs: int) -> Filtering:
    """Choose the filter images by what a ranking needs, within a cost.

    Half a batch is cheap. Where this is less than one image of each class or than a ranking needs, more are taken, at most as
    many as cost AFFORDABLE times the training; more where a data set is so small that training and filtering together
    still take less than a training of the usual length.
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
        wanted, why = RANKED, "fewer rank paths too badly"
    if wanted > max(affordable := int(limit / cost), half):
        wanted, why = max(affordable, half), f"more would cost over {limit:.2g} times the training"
    if wanted >= (val := _val_images(choices, look)):
        wanted, why = val, "all validation images there are"
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
    why = f"about {told_count(float(f'{epochs * images:.2g}'))} images from scratch"
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
            "retrain.lr", 0.2, "at a batch of 256, which it follows; the recipe's 0.05 is for a million images"
        )


def _power_of_two(number: float) -> int:
    """The largest one that is not larger."""
    return 2 ** int(math.log2(max(number, 1)))


def _largest_batch(space: Space, device: torch.device) -> int:
    """That fits into two thirds of a GPU's memory: what training of the dearest path keeps of an image, in bf16, is the
    input and the output of every normalisation."""
    if device.type != "cuda":
        return 2**20
    kept = 0
    for layer in (*space.stem_layers, *space.layers, *space.head_layers):
        hidden = max(parse_op(op).expansion for op in layer.ops) * layer.in_channels
        kept += 2 * hidden * (layer.in_size**2 + layer.out_size**2) + 2 * layer.out_channels * layer.out_size**2
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(_power_of_two(memory / 1.5 / (2 * kept)), 2)
