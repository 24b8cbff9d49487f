"""The first step of a job with a pretrained network: the network is fine-tuned on the training images.

It teaches the supernet and the found networks, and the supernet of a space around it starts from its weights. It is never
trained on the validation images: these rank the paths.
"""

from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from greedynas.data.datasets import Data
from greedynas.models.bases.start import start_from_base
from greedynas.models.bases.timm_bases import network_of_base
from greedynas.models.bases.weights import load_pretrained
from greedynas.models.model_file import WEIGHTS, load_network, make_network
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.runtime.parallel import ranks
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.settings.schema import Config
from greedynas.stages.network_choice import Target, make_card
from greedynas.stages.recipes import make_recipe
from greedynas.stages.retrain import (
    Job,
    check_request,
    finished_test,
    make_request,
    publish,
    results_of,
    train_and_test,
)
from greedynas.stages.run import Run

CALIBRATION = 256  # training images that order the channels of the base and fit its smaller blocks


def adapted_network(
    run: Run, config: Config, data: Data, device: torch.device, precision: str, console: Console
) -> nn.Module | None:
    """Fine-tune the pretrained network of a run on the training images, or load it if that is done.

    Args:
        run: The run, whose `models/base` gets the network.
        config: The settings; those of the fine-tuning are `config.adapt`.
        data: The images.
        device: Where the network is trained.
        precision: "fp32" or "bf16".
        console: Where progress is shown.

    Returns:
        The network in evaluation mode, without gradients; None if the run has none.
    """
    if config.pretrained is None:
        return None
    name, model = config.pretrained
    settings, seed = config.adapt, config.seed
    recipe = make_recipe(settings)
    target = Target(name, timm=model, pretrained=config.weights)
    home = run.folder / "models" / name
    request = make_request(target, settings, recipe, seed)
    check_request(home, target, request)
    if not ranks.on_first(lambda: finished_test(home, recipe)):
        job = Job(run, home, data, device, precision, seed, settings, recipe, None, console, images=data.train)
        test = train_and_test(job, target, request)
        ranks.on_first(lambda: publish(run.folder, name, test["arch"] | results_of(test, settings)))
    network, _ = load_network(home / WEIGHTS)
    return network.to(device, memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]


def refuse_wrong_weights(config: Config, data: Data, folder: Path) -> None:
    """Raise an error if the pretrained network of a run cannot be built with its weights, before the run is started."""
    if config.pretrained is None:
        return
    name, model = config.pretrained
    if not (folder / "models" / name / "retrain.json").exists():
        load_pretrained(make_network(make_card(Target(name, timm=model), data)), model, config.weights)


def begin_supernet(net: SharedSupernet, teacher: nn.Module, data: Data, seed: int) -> None:
    """Give a supernet around a base the weights of the fine-tuned base."""
    rows = data.train.balanced(min(CALIBRATION, len(data.train)), stream(seed, "images that order channels"))
    images, _ = data.train.eval_batch(rows)
    whole = network_of_base(teacher, net.space).to(images.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    start_from_base(net, whole, images)
    logger.info("the supernet starts from %s", net.space.base)
