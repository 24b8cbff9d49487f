"""Found networks of a space around a base as ONNX files and as model files."""

import numpy as np
import pytest
import torch

from greedynas.deploy.onnx_checks import open_session
from greedynas.deploy.onnx_files import make_onnx, run_session
from greedynas.models.model_file import load_network, save_network
from greedynas.models.shared_supernet import SharedSupernet
from greedynas.spaces.paths import op_names
from tests.helpers.bases import random_images, small_space
from tests.helpers.model_files import make_card
from tests.helpers.supernet import with_lively_statistics

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_found_network_agrees_with_its_onnx_file(tmp_path):
    """Check TensorFlow's padding at even and odd sizes, squeeze-and-excitation and a neck."""
    name = "tf_mobilenetv3_small_075"
    space = small_space(sizes=(38, 48), base=name, num_classes=3)
    drawn = ((0, *path[1:].tolist()) for path in space.sample(100, np.random.default_rng(5)))
    path = next(path for path in drawn if "ID" in op_names(path, space) and "MB6_K5_SE" in op_names(path, space))
    net = with_lively_statistics(SharedSupernet(space, generator=torch.Generator().manual_seed(0))).eval()
    with torch.no_grad():
        net.classifier.weight *= 30
        images = random_images(48, 5)
        expected = net(images, path)
    settled, rest = space.settle(path)
    card = make_card(settled, rest, mean=space.mean, std=space.std)
    save_network(tmp_path / "model.safetensors", net.subnet(path), card)
    network, card = load_network(tmp_path / "model.safetensors")
    assert (card.image_size, card.space.base, card.mean) == (38, name, space.mean)
    small = torch.nn.functional.interpolate(images, 38, mode="bilinear", antialias=True)
    session = open_session(make_onnx(network, card).SerializeToString())
    found = torch.from_numpy(run_session(session, small))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-4
