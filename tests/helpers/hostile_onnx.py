"""ONNX files of a few kilobytes that need tens of gigabytes or minutes of time, or that fail while they run."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from greedynas.models.model_file import KEY

SIZE, CLASSES = 8, 3  # of `tests.test_trained.make_card`


def model(card: str, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> bytes:
    """Return a network for images of 8 px whose nodes compute `extra`, a number that is added to every logit."""
    nodes = [
        *nodes,
        helper.make_node("ReduceMean", ["images"], ["pooled"], axes=[2, 3], keepdims=0),
        helper.make_node("Add", ["pooled", "extra"], ["logits"]),
    ]
    batch = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", CLASSES, SIZE, SIZE])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", CLASSES])
    held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [batch], [logits], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(made, {KEY: card})
    return made.SerializeToString()


def hidden(name: str, value: list[float], kind: int = TensorProto.INT64) -> tuple[list[onnx.NodeProto], dict]:
    """Return nodes for a tensor that shape inference cannot compute, because it is added to 0 times a pixel."""
    nodes = [
        helper.make_node("ReduceMin", ["images"], [f"{name}_min"], axes=[0, 1, 2, 3], keepdims=0),
        helper.make_node("Mul", [f"{name}_min", f"{name}_zero"], [f"{name}_none"]),
        helper.make_node("Add", [f"{name}_none", f"{name}_value"], [f"{name}_float"]),
        helper.make_node("Cast", [f"{name}_float"], [name], to=kind),
    ]
    return nodes, {f"{name}_zero": np.float32(0), f"{name}_value": np.array(value, np.float32)}


def _mean(of: str) -> onnx.NodeProto:
    return helper.make_node("ReduceMean", [of], ["extra"], axes=[0, 1, 2, 3], keepdims=0)


def _fills(card: str) -> bytes:
    nodes, constants = hidden("shape", [2**13, 2**10, 2**5, 2**5])  # 34 GB
    return model(card, [*nodes, helper.make_node("ConstantOfShape", ["shape"], ["large"]), _mean("large")], constants)


def _expands(card: str) -> bytes:
    nodes, constants = hidden("shape", [2**16, 3, 2**8, 2**8])
    make = [
        helper.make_node("ReduceMean", ["images"], ["one"], axes=[0, 2, 3], keepdims=1),
        helper.make_node("Expand", ["one", "shape"], ["large"]),
    ]
    return model(card, [*nodes, *make, _mean("large")], constants)


def expands_the_batch(card: str, copies: int = 50) -> bytes:
    """Return a model with many tensors at a time, each of 0.8 GB and below the limit of 2²⁸ numbers."""
    constants: dict[str, np.ndarray] = {"shape": np.array([2**20, 3, 8, 8], np.int64)}
    nodes = [helper.make_node("ReduceMean", ["images"], ["one"], axes=[0, 2, 3], keepdims=1)]
    for i in range(copies):
        constants[f"c{i}"] = np.float32(i)
        nodes.append(helper.make_node("Add", ["one", f"c{i}"], [f"one{i}"]))
        nodes.append(helper.make_node("Expand", [f"one{i}", "shape"], [f"large{i}"]))
    return model(
        card, [*nodes, helper.make_node("Sum", [f"large{i}" for i in range(copies)], ["sum"]), _mean("sum")], constants
    )


def _tiles(card: str) -> bytes:
    nodes, constants = hidden("repeats", [2**14, 1, 2**5, 2**5])
    return model(card, [*nodes, helper.make_node("Tile", ["images", "repeats"], ["large"]), _mean("large")], constants)


def _resizes(card: str) -> bytes:
    nodes, constants = hidden("scales", [1, 1, 6000, 6000], TensorProto.FLOAT)
    resize = helper.make_node("Resize", ["images", "", "scales"], ["large"], mode="nearest")
    return model(card, [*nodes, resize, _mean("large")], constants)


def takes_long(card: str) -> bytes:
    """Return a model with a chain of large products, which takes little memory but many minutes."""
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["one"], axes=[0, 1, 2, 3], keepdims=1),
        helper.make_node("Expand", ["one", "shape"], ["x0"]),
    ]
    nodes += [helper.make_node("MatMul", [f"x{i}", f"x{i}"], [f"x{i + 1}"]) for i in range(200)]
    return model(card, [*nodes, _mean("x200")], {"shape": np.array([1, 1, 4096, 4096], np.int64)})


def _deep(card: str) -> bytes:
    """Return a model with a chain of convolutions that each enlarge the image."""
    constants: dict[str, np.ndarray] = {"w": np.zeros((3, 3, 1, 1), np.float32)}
    nodes = [helper.make_node("Identity", ["images"], ["x0"])]
    nodes += [
        helper.make_node("Conv", [f"x{i}", "w"], [f"x{i + 1}"], pads=[400, 400, 400, 400], kernel_shape=[1, 1])
        for i in range(11)
    ]
    nodes += [helper.make_node("Conv", [f"x{i}", "w"], [f"x{i + 1}"], kernel_shape=[1, 1]) for i in range(11, 2000)]
    return model(card, [*nodes, _mean("x2000")], constants)


def _fails(card: str) -> bytes:
    nodes, constants = hidden("index", [1e6])
    make = [
        helper.make_node("Gather", ["images", "index"], ["far"], axis=0),
        _mean("far"),
    ]
    return model(card, [*nodes, *make], constants)


def _wrong_batch(card: str) -> bytes:
    """Return a model whose number of rows of logits differs from the batch size."""
    nodes, constants = hidden("shape", [77, 3])
    zero = helper.make_node("ConstantOfShape", ["shape"], ["zeros"])
    one = helper.make_node("ReduceMean", ["images"], ["mean"], axes=[0, 1, 2, 3], keepdims=0)
    extra = helper.make_node("Add", ["zeros", "mean"], ["extra"])
    return model(card, [*nodes, zero, one, extra], constants)


MEMORY: dict[str, Callable[[str], bytes]] = {
    "fills": _fills,
    "expands": _expands,
    "expands-the-batch": expands_the_batch,
    "tiles": _tiles,
    "resizes": _resizes,
    "deep": _deep,
}
FAILURES: dict[str, Callable[[str], bytes]] = {"fails": _fails, "wrong-batch": _wrong_batch}
