"""Make the corpus: mutations of valid input, and inputs written by hand.

    python -m tests.fuzz.make_corpus

Inputs that a command accepts are not malformed and are left out; inputs that make it crash or hang are kept and
reported. Run the program again when a format changes: it is seeded, and replaces its earlier files. Inputs that `python
-m tests.fuzz` has found or kept stay.
"""

import contextlib
import copy
import io
import json
import logging
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from safetensors.torch import save

from greedynas import load_space
from greedynas.cli import main as cli
from greedynas.models.model_file import KEY, read_card
from tests.fuzz.kinds import CORPUS, FILES, MODEL, NAME, WORDS, lay, make_run
from tests.helpers import hostile_onnx
from tests.helpers.latency import made_up
from tests.helpers.pictures import paint

SECONDS = 20  # after which a command counts as hanging
MOST = 13  # mutants of each kind of file
DEEP = 5000

NASTY: list[Any] = [
    None, True, -1, 0, 2**63, 10**30, 1.5, -1e308, float("inf"), float("nan"), "", "x" * 3000, "../../../etc/passwd",
    "/etc/passwd", "<script>alert(1)</script>", "\u0000", "\ud7ff\u202e", "__import__('os').system('true')", "[/x]", "\x1b[2J",
    [], {}, [[]], [None], {"": None}, [[[[[[[[[[]]]]]]]]]], ["a", 1, None], {"a": {"a": {}}}, "1e999", "NaN", "%s%s%n",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a nested value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(inner)[:50]:
        yield from places(child, (*path, key))


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a value with one or two places changed, removed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2))):
        path = rng.choice(list(places(value)))
        if not path:
            return copy.deepcopy(rng.choice(NASTY))
        place = value
        for key in path[:-1]:
            place = place[key]
        action, key = rng.random(), path[-1]
        if action < 0.2:
            del place[key]
        elif action < 0.3 and isinstance(place, dict):
            place[rng.choice(("extra", "", "__class__", "../up", str(key).upper()))] = place[key]
        elif action < 0.4 and isinstance(place, list):
            place += copy.deepcopy(place * 3)
        else:
            place[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """Return data that is truncated, noisy, doubled, or has something inserted."""
    content = bytearray(data)
    action = rng.randrange(5)
    if action == 0:
        del content[rng.randrange(len(content)) :]
    elif action == 1:
        for _ in range(rng.choice((1, 5, 50))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif action == 2:
        content += bytes(content)
    elif action == 3:
        at = rng.randrange(len(content))
        content[at:at] = rng.choice(
            (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"]", b"\xed\xa0\x80", b"&a *a", b"!!x ")
        )
    else:
        first, second = sorted(rng.randrange(len(content)) for _ in range(2))
        del content[first:second]
    return bytes(content)


TEXTS = {
    "empty": b"",
    "blank": b" \n\t\n",
    "binary": bytes(range(256)),
    "not-utf8": b"name: \xff\xfe\n",
    "deep-list": b"[" * DEEP,
    "deep-object": b'{"a":' * DEEP,
    "long-number": b'{"schema_version": ' + b"9" * 5000 + b"}",
    "list": b"[1, 2, 3]",
    "word": b"hello",
    "null": b"null",
}
YAMLS = {
    "python-object": b"!!python/object/apply:os.system ['true']\n",
    "python-in-place": b"name: !!python/name:os.system\n",
    "laughs": b"a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nspace: *c\n",
    "own-anchor": b"space: &a\n  stem: *a\n",
    "merge": b"base: &b {image_size: 4}\nspace:\n  <<: *b\n",
    "tabs": b"space:\n\tname: x\n",
    "two-documents": b"a: 1\n---\nb: 2\n",
    "key-is-list": b"? [a, b]\n: 1\n",
    "binary-tag": b"space: !!binary '!!!'\n",
    "date": b"space: 2020-02-30\n",
}
HUGE_SPACES = {
    "too-wide": {"stages": [{"channels": 8192, "repeat": 64}] * 8, "ops": ["MB16_K15_SE", "MB16_K13_SE"]},
    "too-long": {"stages": [{"channels": 8, "repeat": 64}] * 64},
    "too-many-stages": {"stages": [{"channels": 8}] * 65},
    "wide-channels": {"stages": [{"channels": 10**9}]},
    "many-classes": {"num_classes": 10**6, "head": [{"op": "CONV_K1", "channels": 8192}]},
    "large-images": {"image_size": 10**6},
    "escape": {"name": "\x1b]0;title\x07"},
}


class Bomb:
    """An object whose unpickling would be detected."""

    def __reduce__(self) -> Any:
        return (open, ("unpickled", "w"))


def pickles() -> dict[str, bytes]:
    archive = io.BytesIO()
    torch.save({"weight": Bomb()}, archive)
    old = io.BytesIO()
    torch.save({"weight": Bomb()}, old, _use_new_zipfile_serialization=False)
    bare = io.BytesIO()
    with zipfile.ZipFile(bare, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    found = {"torch": archive.getvalue(), "torch-old": old.getvalue(), "zip": bare.getvalue()}
    return found | {f"protocol-{number}": pickle.dumps(Bomb(), protocol=number) for number in range(6)}


def headers(card: str) -> dict[str, bytes]:
    """Return safetensors files with false headers."""

    def file(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + body

    def tensor(**changes: Any) -> dict[str, Any]:
        return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}, "__metadata__": {KEY: card}}

    return {
        "length-huge": file({}, length=2**63),
        "length-100MB": file({}, length=10**8),
        "length-zero": file({}, length=0),
        "length-cut": b"\x08\x00",
        "no-json": file(b"x" * 64),
        "list": file([]),
        "shape-huge": file(tensor(shape=[2**40, 2**40]), bytes(8)),
        "shape-negative": file(tensor(shape=[-2]), bytes(8)),
        "shape-empty-huge": file(tensor(shape=[2**62, 0], data_offsets=[0, 0])),
        "offsets-beyond": file(tensor(shape=[2**30], data_offsets=[0, 2**32]), bytes(8)),
        "offsets-backwards": file(tensor(data_offsets=[8, 0]), bytes(8)),
        "dtype-unknown": file(tensor(dtype="PICKLE"), bytes(8)),
        "metadata-number": file({"__metadata__": {KEY: 1}}),
        "no-card": file({"__metadata__": {}}),
        "no-metadata": file({"a": tensor()["a"]}, bytes(8)),
        "deep": file(b'{"a":' * DEEP + b"}" * DEEP),
        "too-few-weights": file(tensor(), bytes(8)),
    }


def cards(card: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return cards with invalid contents."""
    large = {**card["space"], "image_size": 8, "stages": [{"channels": 4096, "repeat": 8}], "ops": ["MB16_K15"]}
    timm = {key: value for key, value in card.items() if key not in ("space", "path")}
    return {
        "huge-network": {**card, "space": large, "path": [0] * 8},
        "timm-largest": {**timm, "timm": "vit_giant_patch14_224"},
        "timm-hub": {**timm, "timm": "hf-hub:somebody/something"},
        "timm-up": {**timm, "timm": "../../up"},
        "timm-unknown": {**timm, "timm": "no_such_model"},
        "timm-and-space": {**card, "timm": "resnet18"},
        "classes-many": {**card, "class_names": ["c"] * 5000},
        "class-control": {**card, "class_names": ["a", "b"]},
        "crop-tiny": {**card, "crop_fraction": 1e-9},
        "size-huge": {**card, "image_size": 4096},
        "std-zero": {**card, "std": [0, 0, 0]},
        "mean-nan": {**card, "mean": [float("nan")] * 3},
        "path-long": {**card, "path": [0] * 1000},
        "path-outside": {**card, "path": [99, 99]},
    }


def images() -> dict[str, bytes]:
    """Return files that are not images, or images that decompress to too much data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(width: int, height: int, body: bytes = b"") -> bytes:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")

    good = io.BytesIO()
    Image.new("RGB", (9, 9)).save(good, "PNG")
    jpeg = io.BytesIO()
    Image.new("RGB", (9, 9)).save(jpeg, "JPEG")
    return {
        "bomb.png": png(60000, 60000),
        "bomb-flat.png": png(2**31 - 1, 1),
        "zero.png": png(0, 0),
        "text-bomb.png": good.getvalue()[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8))) + good.getvalue()[33:],
        "cut.png": good.getvalue()[:40],
        "cut.jpg": jpeg.getvalue()[:100],
        "program.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(unpickled) (w) file\n%%EOF\n",
        "vector.png": b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>',
        "pickle.png": pickle.dumps(Bomb()),
        "empty.png": b"",
        "text.png": b"hello",
        "gif.gif": b"GIF89a" + b"\xff" * 30,
        "tiff.tif": b"II*\0" + b"\xff" * 40,
        "bmp.bmp": b"BM" + struct.pack("<IHHIIIIHHIIIIII", 0, 0, 0, 54, 40, 2**31 - 1, 2**31 - 1, 1, 24, 0, 0, 0, 0, 0, 0),
        "tga.tga": bytes(18),
        "ppm.ppm": b"P6 99999 99999 255\n",
    }  # fmt: skip


def onnx_files(card: str) -> dict[str, bytes]:
    """Return invalid ONNX files, and those of other programs."""
    from onnx import TensorProto, helper

    def model(nodes: list[Any], card: str | None = card, initializers: Any = (), domain: str = "") -> bytes:
        batch = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 8, 8])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])
        graph = helper.make_graph(nodes, "g", [batch], [logits], list(initializers))
        opset = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
        made = helper.make_model(graph, opset_imports=opset)
        if card is not None:
            helper.set_model_props(made, {KEY: card})
        return made.SerializeToString()

    pool = helper.make_node("ReduceMean", ["images"], ["logits"], axes=[2, 3], keepdims=0)
    shape = helper.make_tensor("shape", TensorProto.INT64, [4], [2**20, 2**10, 2**10, 2**4])
    fill = helper.make_node("ConstantOfShape", ["shape"], ["filled"])
    tile = helper.make_node("Expand", ["images", "shape"], ["filled"])
    mean = helper.make_node("ReduceMean", ["filled"], ["m"], axes=[0, 1, 2, 3], keepdims=0)
    add = helper.make_node("Add", ["pooled", "m"], ["logits"])
    pooled = helper.make_node("ReduceMean", ["images"], ["pooled"], axes=[2, 3], keepdims=0)
    outside = helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])
    outside.data_location = TensorProto.EXTERNAL
    entry = outside.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    loop = helper.make_node("Loop", ["", "", "images"], ["logits"], body=helper.make_graph([], "b", [], []))
    greedy = {**hostile_onnx.MEMORY, **hostile_onnx.FAILURES}
    return {
        **{f"hidden-{name}.onnx": make(card) for name, make in greedy.items()},
        "no-card.onnx": model([pool], card=None),
        "own-operator.onnx": model([helper.make_node("Run", ["images"], ["logits"], domain="evil")], domain="evil"),
        "external.onnx": model([pool], initializers=[outside]),
        "loop.onnx": model([loop]),
        "fills-memory.onnx": model([pooled, fill, mean, add], initializers=[shape]),
        "expands.onnx": model([pooled, tile, mean, add], initializers=[shape]),
        "no-nodes.onnx": model([]),
        "unknown-node.onnx": model([helper.make_node("NoSuchOp", ["images"], ["logits"])]),
        "card-cut.onnx": model([pool], card=card[:50]),
        "empty.onnx": b"",
        "text.onnx": b"hello",
        "pickle.onnx": pickle.dumps(Bomb()),
    }


WORD_LISTS: dict[str, list[str]] = {
    "path": ["", "9" * 8, "0" * 7, "0" * 9, "²" * 8, "0,1,2", "a b c", "-1 0 0 0 0 0 0 0", "0" * 5000, "ID " * 8 + "ID", "MB3_K3", "0x1 0 0 0 0 0 0 0", "٣" * 8, "1e3," * 8, "\x00" * 8, "None " * 8],
    "known": ["greedynas-z", "../greedynas-a", "", "[bold]", "GREEDYNAS_A", "0123", "MB3_K3 MB3_K3", "\x1b[2J", "a" * 3000],
    "flops": ["", "0", "-5M", "1e400", "nan", "inf", "5X", "M", "5 0M", "0x10", "1e-9", "١٢M", "5M; rm -rf /", "9" * 400, "1,2,3.4.5", "--5", "5MM", "1_0_M_", "0.0000001K"],
    "latency": ["", "0ms", "-1ms", "1e400s", "nan", "5 hours", "ms", "1,5,ms.", "9" * 400, "0x1ms"],
    "set": ["", "=", "lr", "lr=", "lr=[", "lr=-1", "lr=nan", "lr=1e999", "=1", "train=1", "train.lr.x=1", "no.such=1", "train.m={}", "data.workers=-1", "space=nothing", "seed=-1", "batch_size=1", "batch_size=10000000000", "lr=!!python/object/apply:os.system ['true']", "warmup=-1", "k=11", "device=cuda:x", "image_size=0", "train.filtering=maybe", "data.val_images=2.5", "pool_size=1", "a.b.c.d=1", "__class__=1", "name=[1]", "reasons=3"],
    "arch": ["", "timm:", "timm:no_such", "timm:../x", "timm:hf-hub:a/b", "../..", "99", "0" * 500, "ID", "greedynas-z", "[1]", "\x00", "timm:resnet18.no_tag", "/etc/passwd"],
    "model": ["..", ".", "../..", "/etc", "a/b", "no-such", ".hidden", "a\x00b", "x" * 300, "~", "*"],
    "name": ["", "..", "../up", "/tmp/up", "a/b", ".x", "a b", "x" * 101, "\x00", "a\nb", "ü/x"],
    "source": ["no/such/folder", "", "torch/no", "torch/", "/dev/null", "wds/pipe:true", "hfds/x/../y", "\x00", "http://example.invalid/x", "~nobody/x", "a" * 5000, "-"],
    "hours": ["", "-1", "0", "nan", "x", "1e400", "1h"],
}  # fmt: skip


def candidates(run: Path, rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """Yield (kind, name, content) of all candidates for the corpus."""
    home = run / "models" / NAME
    space = load_space("macro").model_dump(mode="json", exclude_none=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    card = read_card(run / MODEL).model_dump(mode="json", exclude_none=True)
    weights = torch.nn.Linear(2, 2).state_dict()
    state = {"net": "x"}
    with (next(iter(sorted((run / "supernet").glob("step-*"))))).open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        state = json.loads(header["__metadata__"]["state"])
    export = {"schema_version": 1, "machine": "m", "threads": 1, "images": 5, "skipped": [], "files": [{"file": "model.onnx", "precision": "fp32", "bytes": 5, "top1": 0.5, "latency_ms": 1.0}]}  # fmt: skip
    top = {"schema_version": 1, "candidates": [{**json.loads((home / "arch.json").read_text()), "val_top1": 0.5, "val_loss": 1.0}]}  # fmt: skip
    search = json.loads((run / "searches" / NAME / "search.json").read_text())
    jsons: dict[str, tuple[Any, ...]] = {
        "arch": (json.loads((home / "arch.json").read_text()),),
        "searched": (search,),
        "resumed": (search,),
        "tested": (json.loads((home / "test.json").read_text()),),
        "test": (json.loads((home / "test.json").read_text()),),
        "retrain": (json.loads((home / "retrain.json").read_text()),),
        "top": (top,),
        "export": (export,),
        "pool": (json.loads((run / "supernet" / "pool.json").read_text()),),
        "data": ({"schema_version": 1, "classes": 3, "train": 42, "val": 12, "digest": "0" * 16},),
        "state": (state,),
        "retrain-state": (
            {
                "step": 1,
                "epoch": 0,
                "optimization_images": 5,
                "recent_losses": [],
                "epoch_loss": 0.0,
                "metrics_length": 0,
                "seconds": 0.0,
            },
        ),
        "table": (made_up(load_space("macro")).model_dump(mode="json"),),
    }
    yamls = {"space": space, "config": {key: config[key] for key in ("space", "data", "train", "search", "retrain")}, "run-config": config}  # fmt: skip
    for kind, (value,) in jsons.items():
        for name, text in TEXTS.items():
            yield kind, f"{name}.json", text
        whole = json.dumps(value).encode()
        for number in range(30):
            mutant = json.dumps(mutate(value, rng)).encode() if number % 3 else spoiled(whole, rng)
            yield kind, f"mutant-{number:02d}.json", mutant
    for kind, value in yamls.items():
        for name, text in (TEXTS | YAMLS).items():
            yield kind, f"{name}.yaml", text
        for name, changes in HUGE_SPACES.items():
            large = {**space, **changes}
            wanted = large if kind == "space" else {**value, "space": large}
            yield kind, f"{name}.yaml", yaml.safe_dump(wanted, sort_keys=False).encode()
        whole = yaml.safe_dump(value, sort_keys=False).encode()
        for number in range(25):
            changed = (
                yaml.safe_dump(mutate(value, rng), sort_keys=False).encode() if number % 3 else spoiled(whole, rng)
            )
            yield kind, f"mutant-{number:02d}.yaml", changed
    timings = {"Conv-input:32x32x3-output:32x32x32": {"mean": 1.0, "var": 0.1, "count": 5}}
    for name, text in (TEXTS | YAMLS).items():
        yield "timings", f"{name}.yaml", text
    for number in range(20):
        yield "timings", f"mutant-{number:02d}.yaml", yaml.safe_dump(mutate(timings, rng)).encode()
    lines = (run / "metrics.jsonl").read_bytes()
    for name, text in TEXTS.items():
        yield "metrics", f"{name}.jsonl", text + b"\n"
    for number in range(20):
        rows = [json.loads(line) for line in lines.splitlines()[:3]]
        yield (
            "metrics",
            f"mutant-{number:02d}.jsonl",
            b"".join(json.dumps(mutate(r, rng)).encode() + b"\n" for r in rows),
        )
    lines = (run / "data.jsonl").read_bytes()
    for name, text in TEXTS.items():
        yield "manifest", f"{name}.jsonl", text + b"\n"
    for number in range(20):
        head, *rows = [json.loads(line) for line in lines.splitlines()]
        row = rng.randrange(len(rows))
        head, rows[row] = (mutate(head, rng), rows[row]) if number % 2 else (head, mutate(rows[row], rng))
        changed = b"".join(json.dumps(one).encode() + b"\n" for one in (head, *rows))
        yield "manifest", f"mutant-{number:02d}.jsonl", changed if number % 3 else spoiled(lines, rng)
    for name, content in pickles().items():
        yield "model", f"pickle-{name}.safetensors", content
        yield "weights", f"pickle-{name}.pth", content
    yield "weights", "others.safetensors", save(weights)
    for name, content in headers(json.dumps(card)).items():
        yield "model", f"header-{name}.safetensors", content
    for name, changed_card in cards(card).items():
        yield "model", f"card-{name}.safetensors", save(weights, {KEY: json.dumps(changed_card)})
    for number in range(20):
        yield "model", f"mutant-{number:02d}.safetensors", save(weights, {KEY: json.dumps(mutate(card, rng))})
    for name, content in images().items():
        yield "image", name, content
    for name, content in onnx_files(json.dumps(card)).items():
        yield "onnx", name, content


def call(command: list[str]) -> tuple[int, str]:
    """Run the command line in this process; return the exit code (-1: it hangs, 1: it crashes) and standard error."""

    def too_long(*_: Any) -> None:
        raise TimeoutError

    told = io.StringIO()
    handlers = list(logging.getLogger("greedynas").handlers)
    sys.argv = ["greedynas", *command]
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as stop:
        return int(stop.code or 0), told.getvalue()
    except TimeoutError:
        return -1, told.getvalue()
    except BaseException as error:
        return 1, f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        logging.getLogger("greedynas").handlers[:] = handlers
    return 0, told.getvalue()


def refused_well(code: int, told: str) -> bool:
    """Return whether a command ended with exit code 2 and one line, at most after warnings."""
    lines = told.splitlines()
    return code == 2 and lines[-1].startswith("error: ") and all(line.startswith("warning: ") for line in lines[:-1])


def _clear() -> None:
    """Remove the files that this program makes; inputs that the fuzzer has found or kept stay."""
    for file in CORPUS.glob("*/*"):
        if file.is_file() and file.parent.name != "words" and not file.name.startswith(("found-", "new-")):
            file.unlink()


def main() -> None:
    torch.set_num_threads(1)
    rng = random.Random(7)
    _clear()
    kept: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        photos = paint(folder / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
        image = next(photos.rglob("*.png"))
        base = make_run(folder, photos, lambda *command: (call([str(part) for part in command])[0], "", ""))
        for kind, name, content in candidates(base, rng):
            if kept.get(kind, 0) >= MOST and name.startswith("mutant"):
                continue
            run = folder / "work"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(base, run)
            file = folder / name
            file.write_bytes(content)
            code, told = call(lay(FILES[kind], content, file, run, image))
            if not refused_well(code, told):
                print(f"{kind}/{name}: {code} {told[-300:]!r}", flush=True)
            if code != 0:
                (CORPUS / kind).mkdir(parents=True, exist_ok=True)
                (CORPUS / kind / name).write_bytes(content.replace(bytes(photos), b"photos"))
                kept[kind] = kept.get(kind, 0) + 1
        (CORPUS / "words").mkdir(parents=True, exist_ok=True)
        for kind, words in WORD_LISTS.items():
            refused = []
            there = CORPUS / "words" / f"{kind}.json"
            for word in dict.fromkeys([*words, *(json.loads(there.read_text("utf-8")) if there.exists() else ())]):
                run = folder / "work"
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(base, run)
                code, told = call(lay(WORDS[kind], b"", None, run, image, word))
                if not refused_well(code, told):
                    print(f"words/{kind} {word!r:.60}: {code} {told[-300:]!r}", flush=True)
                refused += [word] if code != 0 else []
            (CORPUS / "words" / f"{kind}.json").write_text(json.dumps(refused, indent=0) + "\n", encoding="utf-8")
            kept[f"words/{kind}"] = len(refused)
    print(json.dumps(kept), sum(kept.values()))


if __name__ == "__main__":
    main()
