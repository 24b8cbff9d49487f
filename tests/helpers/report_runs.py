"""Run directories for the tests of the report: real trainings and searches, with model files written by hand."""

import base64
import io
import json
import shutil

import numpy as np
from PIL import Image
from rich.console import Console

from greedynas.rundir.schemas import pack_bits
from greedynas.settings.schema import Config
from greedynas.stages.search import make_requests, search_stage
from greedynas.stages.train import train_stage
from tests.helpers.latency import made_up
from tests.helpers.search import DATA
from tests.helpers.training import SETTINGS, tiny_space

QUIET = Console(quiet=True)
NO_LIMITS = {"macs": (None, None), "params": (None, None), "latency_ms": (None, None)}
# Names that look like HTML, a script, plotly's markup, a template or a date, and one in other scripts.
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<b>bold</b><br><a href='https://example.com'>link</a>",
    "&lt;amp&gt; &amp; \"quotes\" 'single'",
    "%{x} ${y} {{ z }} {% raw %}",
    "2020-01-01",
    "2020-01-01",
    "鞋子 👟 حذاء",
]


def trained(folder, photos, experimental=None, **train):
    """Train a tiny supernet and return its run directory."""
    train = {"pool_size": 3, "max_epochs": 4, "alpha": 0.1, **train}
    settings = {"data": {**DATA, "source": str(photos)}, "train": {**SETTINGS, **train}}
    config = Config(name="tiny", space=tiny_space(), **settings, experimental=experimental or {})
    train_stage(config, folder, QUIET)
    return folder


def searched(folder, *, pool_init=True, searcher="evolution", table=None, settings=(), **limits):
    settings = ["population=8", "generations=4", *settings]
    requests = make_requests(folder, {**NO_LIMITS, **limits}, searcher, (), pool_init, None, settings, None)
    return search_stage(folder, requests, table, QUIET)[0]


def latency_table(folder, **about):
    file = folder / "latency.json"
    made_up(tiny_space(), **about).save(file)
    return file


def picture(number):
    """Return a thumbnail in the form of `test.json`."""
    pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    with io.BytesIO() as data:
        Image.fromarray(pixels).save(data, "PNG")
        return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def facts_of_a_test(class_names, top1=0.75, images=2000, samples=6, correct=None):
    """Return a consistent `test.json`; like earlier versions, without `correct` it does not say which images were
    right."""
    classes = len(class_names)
    per_class = images // classes
    right = round(top1 * per_class)
    confusion = np.zeros((classes, classes), int)
    for i in range(classes):
        confusion[i, i] = right if classes > 1 else per_class
        confusion[i, (i + 1) % classes] += per_class - right
    shown = [
        {"image": picture(i), "label": i % classes, "predicted": (i + i % 2) % classes, "probability": 0.5 + i / 100}
        for i in range(samples)
    ]
    return {
        "schema_version": 1,
        "images": images,
        "top1": top1,
        "top5": 0.99 if classes > 5 else None,
        "macro": top1,
        "loss": 0.7,
        "class_names": class_names,
        "per_class": [right / per_class] * classes,
        "confusion": confusion.tolist(),
        "samples": shown,
        **({} if correct is None else {"correct": pack_bits(correct)}),
    }


def retraining_lines(epochs=3, steps=5):
    for epoch in range(epochs):
        for i in range(steps):
            step = epoch * steps + i + 1
            yield {"kind": "step", "step": step, "epoch": epoch, "loss": 2 / step, "lr": 0.1 / step, "seconds": 1.0}
        yield {"kind": "epoch", "step": step, "epoch": epoch + 1, "loss": 2 / step, "lr": 0.1 / step}


def export_facts(machine="abacus"):
    def file(name, precision, **more):
        return {"file": name, "precision": precision, "bytes": 170_000, "top1": 0.75, "latency_ms": 0.21, **more}

    return {
        "schema_version": 1,
        "machine": machine,
        "threads": 1,
        "images": 2000,
        "files": [
            file("model.onnx", "fp32", agrees={"images": 100, "max_difference": 3e-7}),
            file("model.int8.onnx", "int8", bytes=60_000, top1=0.741, latency_ms=0.15),
            file("model.safetensors", "fp32", latency_ms=None),
        ],
    }


def add_model(
    folder,
    name,
    *,
    chosen=False,
    top1=0.75,
    class_names=("ape", "bee", "cat"),
    samples=6,
    export=True,
    correct=None,
    **arch,
):
    """Write the files of a trained and exported model; `arch` overrides entries of an existing `arch.json`."""
    top1 = top1 if correct is None else float(np.mean(correct))
    home = folder / "models" / name
    home.mkdir(parents=True, exist_ok=True)
    file = home / "arch.json"
    before = json.loads(file.read_text()) if file.exists() else {"schema_version": 1, "model": name}
    write(file, {**before, "test_top1": top1, "recipe": "sgd", "epochs": 3, **arch})
    write(home / "test.json", facts_of_a_test(list(class_names), top1, samples=samples, correct=correct))
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in retraining_lines()))
    if export:
        write(home / "export.json", export_facts())
    if chosen:
        shutil.copy(file, folder)
    return home


def add_timm(folder, name="timm-mobilenetv2_100", **more):
    return add_model(folder, name, timm="mobilenetv2_100", macs=90_000, params=5_000, num_classes=3, **more)


def write(file, value):
    file.write_text(json.dumps(value))


def read(file):
    return json.loads(file.read_text())


def change(file, **changes):
    """Change values of a JSON file; `None` becomes null."""
    write(file, {**read(file), **changes})
