"""Test helpers shared by `tests.models.test_model_file` and others."""

import torch

from greedynas import Fixed, Space, Stage
from greedynas.data.transforms import normalisation
from greedynas.models.model_file import Card, make_network, save_network
from greedynas.runtime.rng import torch_stream
from tests.helpers.supernet import with_lively_statistics
from tests.helpers.training import tiny_space

SE = tiny_space(activation="hard_swish")
SHUFFLE = Space(
    name="shuffle",
    ops=["SHUFFLE_K3", "XCEPTION_K3"],
    stem=[Fixed(op="CONV_K3", channels=8, stride=2)],
    stages=[Stage(channels=16, repeat=2, stride=2), Stage(channels=32, repeat=1, stride=2)],
    image_size=8,
    num_classes=3,
)
NAMES = ("a", "b", "c")


def make_card(space=SE, path=None, class_names=NAMES, name="best", **changes):
    """Return the card of a network for the images of `photos`; a string as the space names a timm model."""
    if isinstance(space, str):
        network, size, channels = {"timm": space}, 32, 3
    else:
        space = space.adapt(num_classes=len(class_names))
        path = path or tuple(count - 1 for count in space.num_ops)
        network, size, channels = {"space": space, "path": path}, space.image_size, space.image_channels
    mean, std = normalisation(channels)
    facts = {"image_size": size, "image_channels": channels, "crop_fraction": 1.0, "mean": mean, "std": std}
    return Card(name=name, class_names=class_names, **network, **{**facts, **changes})


def trained_network(card, seed=0):
    """Return a network as after training, with different statistics in each channel and confident predictions."""
    network = with_lively_statistics(make_network(card, torch_stream(seed, "init"))).eval()
    classifier = network.get_classifier()
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.normal_(0, 0.5, generator=torch_stream(seed, "classifier"))
    return network


def save_trained(file, card=None, seed=0):
    card = card or make_card()
    file.parent.mkdir(parents=True, exist_ok=True)
    network = trained_network(card, seed)
    save_network(file, network, card)
    return network
