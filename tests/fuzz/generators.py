"""Hypothesis strategies for the fuzzer, which change valid input in a few places or generate it.

They draw every decision, so that hypothesis can make a failing input smaller.
"""

import copy
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import yaml
from hypothesis import strategies as st
from onnx import TensorProto, helper

from greedynas import load_space
from greedynas.models.model_file import KEY
from greedynas.settings.loading import all_keys
from tests.fuzz.kinds import CORPUS, FILES, MODEL, NAME, WORDS
from tests.fuzz.make_corpus import NASTY, WORD_LISTS
from tests.helpers import hostile_onnx
from tests.helpers.latency import made_up

LONGEST = 300_000  # bytes of a seed; larger ones would slow everything down

text = st.text(max_size=40)
numbers = st.integers() | st.integers(-5, 70) | st.floats() | st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63)])
scalars = st.none() | st.booleans() | numbers | text | st.sampled_from(NASTY)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=8
)
TOKENS = (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"]", b"\xed\xa0\x80", b"&a *a", b"!!int ''", b"<<: ", b"NaN", b"1e999",
          b"9" * 40, b'"a":1,"a":2', b"\x1b[2J", b"[/x]", b"\n", b"- " * 20, b"[" * 200)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A kind of input with its strategy: contents of a file, or words of the command line."""

    kind: str
    inputs: st.SearchStrategy[bytes] | st.SearchStrategy[str]
    suffix: str = ""  # of the file; empty for words


# Values


@st.composite
def mutated(draw: Callable[..., Any], whole: list[Any]) -> Any:
    """Draw a valid value with up to three places replaced, removed, doubled or renamed."""
    value = copy.deepcopy(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(1, 3))):
        place, key = _walk(draw, value)
        if place is None:
            return draw(values)
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "double", "nest"]))
        if how == "remove":
            del place[key]
        elif how == "rename" and isinstance(place, dict):
            place[draw(text)] = place.pop(key)
        elif how == "double" and isinstance(place, list):
            place += copy.deepcopy(place * draw(st.integers(1, 3)))
        elif how == "nest":
            place[key] = [place[key]]
        else:
            place[key] = draw(values)
    return value


def _walk(draw: Callable[..., Any], value: Any) -> tuple[Any, Any]:
    """Draw a place in a nested value: its container and its key there."""
    place, key = None, None
    while isinstance(value, (dict, list)) and value:
        place, key = value, draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        value = place[key]
        if draw(st.integers(0, 9)) == 0:
            break
    return place, key


@st.composite
def spoiled(draw: Callable[..., Any], seeds: list[bytes]) -> bytes:
    """Draw a file that is truncated, changed in a few bytes, partly doubled, or has something inserted."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["cut", "change", "insert", "double", "remove"]))
        end = min(len(data), at + draw(st.integers(0, 200)))
        if how == "cut":
            del data[at:]
        elif how == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.sampled_from(TOKENS) | st.binary(max_size=8))
        elif how == "double":
            data[at:at] = data[at:end]
        else:
            del data[at:end]
    return bytes(data)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", errors="surrogatepass")


def _yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode("utf-8", errors="replace")


def of_file(whole: list[Any], write: Callable[[Any], bytes], kept: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for changed values and damaged files, from valid ones and from the corpus."""
    seeds = [write(value) for value in whole] + [one for one in kept if len(one) <= LONGEST]
    return mutated(whole).map(write) | mutated(whole).map(write) | spoiled(seeds)


# Weights


@st.composite
def weights(draw: Callable[..., Any], whole: bytes, card: dict[str, Any]) -> bytes:
    """Draw a safetensors file with a changed header or card, damaged numbers or damaged bytes."""
    length = struct.unpack("<Q", whole[:8])[0]
    header, body = json.loads(whole[8 : 8 + length]), bytearray(whole[8 + length :])
    how = draw(st.sampled_from(["header", "card", "numbers", "bytes", "length"]))
    if how == "header":
        header = draw(mutated([header]))
    elif how == "card":
        header["__metadata__"] = {KEY: json.dumps(draw(mutated([card])))}
    elif how == "numbers":
        at = 4 * draw(st.integers(0, len(body) // 4 - 1))
        body[at : at + 4] = draw(st.binary(min_size=4, max_size=4))
    elif how == "bytes":
        return draw(spoiled([whole]))
    words = json.dumps(header).encode()
    claimed = draw(st.integers(0, 2**64 - 1)) if how == "length" else len(words)
    return struct.pack("<Q", claimed) + words + bytes(body)


# ONNX

SCHEMAS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})
EXTENTS = st.integers(-2, 40) | st.sampled_from([2**10, 2**16, 2**20, 2**31, 2**40, 2**62])


@st.composite
def networks(draw: Callable[..., Any], whole: bytes, card: dict[str, Any]) -> bytes:
    """Draw a model with changed operators, attributes, shapes, constants or card, or one that needs many resources."""
    if draw(st.integers(0, 3)) == 0:
        return draw(growing(json.dumps(card)))
    model = onnx.ModelProto.FromString(whole)
    graph = model.graph
    for _ in range(draw(st.integers(1, 3))):
        how = draw(
            st.sampled_from(["op", "attribute", "input", "constant", "shape", "card", "remove", "bytes", "insert"])
        )
        node = graph.node[draw(st.integers(0, len(graph.node) - 1))] if graph.node else None
        if how == "bytes":
            return draw(spoiled([model.SerializeToString()]))
        if how == "op" and node is not None:
            node.op_type = draw(st.sampled_from(SCHEMAS))
        elif how == "attribute" and node is not None:
            _change_attribute(draw, node)
        elif how == "input" and node is not None and node.input:
            names = [name for other in graph.node for name in other.output] + ["images", ""]
            node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(names))
        elif how == "constant" and graph.initializer:
            tensor = graph.initializer[draw(st.integers(0, len(graph.initializer) - 1))]
            _change_tensor(draw, tensor)
        elif how == "shape":
            value = draw(st.sampled_from([*graph.input, *graph.output]))
            dims = value.type.tensor_type.shape.dim
            if dims:
                dims[draw(st.integers(0, len(dims) - 1))].dim_value = draw(EXTENTS)
        elif how == "card":
            helper.set_model_props(model, {KEY: json.dumps(draw(mutated([card])))})
        elif how == "remove" and graph.node:
            del graph.node[draw(st.integers(0, len(graph.node) - 1))]
        elif how == "insert":
            name = draw(st.sampled_from(SCHEMAS))
            at = draw(st.integers(0, len(graph.node)))
            graph.node.insert(at, helper.make_node(name, ["images"], [f"new{at}"]))
    return model.SerializeToString()


def _change_attribute(draw: Callable[..., Any], node: onnx.NodeProto) -> None:
    if not node.attribute:
        name = draw(st.sampled_from(["axis", "group", "strides", "pads", "kernel_shape", "to", "perm"]))
        node.attribute.append(helper.make_attribute(name, draw(EXTENTS)))
        return
    attribute = node.attribute[draw(st.integers(0, len(node.attribute) - 1))]
    if attribute.type == onnx.AttributeProto.INTS:
        attribute.ints[:] = draw(st.lists(EXTENTS, max_size=6))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = draw(EXTENTS)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = draw(st.floats(width=32))


def _change_tensor(draw: Callable[..., Any], tensor: TensorProto) -> None:
    how = draw(st.sampled_from(["dims", "type", "data", "elsewhere"]))
    if how == "dims":
        tensor.dims[:] = draw(st.lists(EXTENTS, max_size=5))
    elif how == "type":
        tensor.data_type = draw(st.integers(0, 30))
    elif how == "data":
        tensor.raw_data = draw(st.binary(max_size=64))
    else:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=draw(st.sampled_from(["/etc/passwd", "../x", "model.onnx"])))


@st.composite
def growing(draw: Callable[..., Any], card: str) -> bytes:
    """Draw a model with a tensor whose size shape inference cannot compute."""
    extents = draw(st.lists(st.integers(1, 2**14), min_size=4, max_size=4))
    nodes, constants = hostile_onnx.hidden("wanted", extents)
    op = draw(st.sampled_from(["ConstantOfShape", "Expand", "Tile", "Resize", "Reshape"]))
    inputs = {"ConstantOfShape": ["wanted"], "Resize": ["images", "", "", "wanted"]}.get(op, ["images", "wanted"])
    nodes.append(helper.make_node(op, inputs, ["large"]))
    for i in range(draw(st.integers(0, 3))):
        nodes.append(
            helper.make_node(draw(st.sampled_from(["Exp", "MatMul", "Add"])), ["large"] * (1 + i % 2), [f"l{i}"])
        )
    nodes.append(helper.make_node("ReduceMean", ["large"], ["extra"], axes=[0, 1, 2, 3], keepdims=0))
    return hostile_onnx.model(card, nodes, constants)


# Words


# Settings that may legitimately make a training long or use many processes.
LASTING = ("max_epochs", "train.m", "workers", "name", "seed", "expect", "asked", "space")


def assignments(lasting: bool = True) -> st.SearchStrategy[str]:
    """Return a strategy for `--set` arguments with all settings, and with plausible and implausible values."""
    names = [key for key in all_keys() if lasting or not key.endswith(LASTING)]
    keys = st.sampled_from([*names, *(key.rpartition(".")[2] for key in names)]) | text
    if not lasting:
        keys = st.sampled_from(names)
    written = st.one_of(
        numbers.map(str),
        values.map(lambda value: json.dumps(value)),
        st.sampled_from(["", "~", "yes", "1e300", "-0", ".inf", "0x10", "1_000", "12:30", "2024-31-12", '!!int ""', "&a [*a]", "[", "{a: 1, a: 2}", "'", "%"]),
        text,
    )  # fmt: skip
    made = st.builds("{}={}".format, keys, written)
    return made | text | st.sampled_from(WORD_LISTS["set"]) if lasting else made


def words(kind: str) -> st.SearchStrategy[str]:
    if kind in ("set", "trained"):
        return assignments(lasting=kind == "set")
    alphabets = {"flops": "0123456789.,_eEKMGT -+x", "latency": "0123456789.,_eEmsu -+", "path": "0123456789, ID_MBK-|", "hours": "0123456789.eh-"}  # fmt: skip
    alphabet = alphabets.get(kind)
    made = st.text(alphabet=alphabet, max_size=24) if alphabet else text
    made = made | text | st.sampled_from(WORD_LISTS.get(kind, [""]))
    return made.filter(_takes_no_hours) if kind == "hours" else made


def _takes_no_hours(word: str) -> bool:
    """Return whether a word is not a valid number of hours, with which a whole job would begin."""
    try:
        return not 1e-4 < float(word) < 1e300
    except ValueError:
        return True


# All kinds


def targets(run: Path, exported: Path) -> list[Target]:
    """Return all fuzzed kinds of input, made from a finished run and an ONNX file of its network."""
    home = run / "models" / NAME
    kept = {kind: [file.read_bytes() for file in sorted((CORPUS / kind).glob("*"))] for kind in FILES}
    card = json.loads(_header(run / MODEL)["__metadata__"][KEY])
    state = json.loads(_header(sorted((run / "supernet").glob("step-*"))[-1])["__metadata__"]["state"])
    config = yaml.safe_load((run / "config.yaml").read_text())
    spaces = [load_space(name).model_dump(mode="json", exclude_none=True) for name in ("macro", "fashion")]
    retraining = {"step": 1, "epoch": 0, "optimization_images": 5, "recent_losses": [], "epoch_loss": 0.0,
                  "metrics_length": 0, "seconds": 0.0}  # fmt: skip
    search = json.loads((run / "searches" / NAME / "search.json").read_text())
    record = json.loads((home / "export.json").read_text())
    jsons = {
        "table": [made_up(load_space("macro")).model_dump(mode="json")],
        "searched": [search],
        "resumed": [search],
        "arch": [json.loads((home / "arch.json").read_text())],
        "tested": [json.loads((home / "test.json").read_text())],
        "test": [json.loads((home / "test.json").read_text())],
        "retrain": [json.loads((home / "retrain.json").read_text())],
        "export": [record],
        "exported": [record],
        "pool": [json.loads((run / "supernet" / "pool.json").read_text())],
        "state": [state],
        "continued": [state],
        "retrain-state": [retraining],
    }
    yamls = {
        "space": spaces,
        "config": [{key: config[key] for key in ("space", "train", "search", "retrain")}],
        "run-config": [config],
        "timings": [{"Conv-input:32x32x3-output:32x32x32": {"mean": 1.0, "var": 0.1, "count": 5}}],
    }
    found = [Target(kind, of_file(whole, _json, kept[kind]), ".json") for kind, whole in jsons.items()]
    found += [Target(kind, of_file(whole, _yaml, kept[kind]), ".yaml") for kind, whole in yamls.items()]
    found.append(Target("model", weights((run / MODEL).read_bytes(), card) | spoiled(kept["model"]), ".safetensors"))
    found.append(Target("onnx", networks(exported.read_bytes(), card) | spoiled(kept["onnx"]), ".onnx"))
    lines = [(run / "data.jsonl").read_bytes(), *kept["manifest"]]
    found.append(Target("manifest", spoiled([one for one in lines if one and len(one) <= LONGEST]), ".jsonl"))
    found += [Target(f"words/{kind}", words(kind)) for kind in WORDS]
    return found


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        return json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
