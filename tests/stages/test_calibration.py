"""Tests of the int8 calibration: the ranges of the activations are those of the training images."""

import numpy as np
import onnx
import pytest
from PIL import Image
from rich.console import Console

from greedynas.deploy.onnx_files import open_session
from greedynas.runtime.files import write_json
from greedynas.settings.schema import Config
from greedynas.stages.export import export_stage
from greedynas.stages.run import Run
from tests.helpers.model_files import SE, make_card, save_trained
from tests.helpers.pictures import opened

pytestmark = pytest.mark.usefixtures("one_thread")

# Lowest and highest pixel. The ranges barely overlap, so statistics of another set would be noticed.
RANGES = {"train": (70, 190), "val": (0, 120), "test": (20, 255)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export a network of a run whose training images have other pixels than its validation and test images."""
    folder = tmp_path_factory.mktemp("calibration")
    rng = np.random.default_rng(0)
    for split, (low, high) in RANGES.items():
        for name in "abc":
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(12):
                pixels = rng.integers(low, high, (8, 8, 3), endpoint=True, dtype=np.uint8)
                pixels[0, 0], pixels[0, 1] = low, high
                Image.fromarray(pixels).save(folder / "data" / split / name / f"{i}.png")
    config = Config(name="tiny", space=SE, device="cpu", data={"source": str(folder / "data"), "workers": 0})
    Run.start(folder / "run", config).close()
    save_trained(folder / "run" / "models" / "best" / "model.safetensors", make_card())
    write_json(folder / "run" / "arch.json", {"model": "best"})
    export_stage(folder / "run", Console(quiet=True), formats=["onnx"])
    return folder / "run" / "models" / "best", opened(folder / "data", 8, 3)


def ranges(model):
    """Return the range of each quantised activation by its name: (lowest, highest, width of a step)."""
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            scale, zero = float(constants[node.input[1]]), int(constants[node.input[2]])
            found[node.input[0]] = (-zero * scale, (255 - zero) * scale, scale)
    return found


def with_all_outputs(model, names):
    """Return the model with these activations as additional outputs."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    return open_session(model.SerializeToString())


def test_the_range_of_the_input_is_that_of_the_training_images(exported):
    home, data = exported
    lowest, highest, step = ranges(onnx.load(home / "model.int8.onnx"))["images"]
    images, _ = data.train.eval_batch()
    assert (lowest, highest) == pytest.approx((images.min().item(), images.max().item()), abs=step)
    for other in (data.val, data.test()):
        pixels, _ = other.eval_batch()
        assert max(abs(lowest - pixels.min().item()), abs(highest - pixels.max().item())) > 20 * step


def test_the_range_of_every_activation_is_that_of_the_training_images(exported):
    """ONNX Runtime widens a range to 0 where it does not contain it."""
    home, data = exported
    found = ranges(onnx.load(home / "model.int8.onnx"))
    whole = onnx.load(home / "model.onnx")
    made = {name for node in whole.graph.node for name in node.output}
    names = sorted(found.keys() & made)
    assert len(names) > 10
    images, _ = data.train.eval_batch()
    values = with_all_outputs(whole, names).run(names, {"images": images.contiguous().numpy()})
    for name, value in zip(names, values, strict=True):
        lowest, highest, step = found[name]
        assert (lowest, highest) == pytest.approx((min(0, value.min()), max(0, value.max())), abs=2 * step), name
