"""The first screen of the report: how good the network is, and how to use it."""

import shlex
from dataclasses import dataclass

from greedynas.reporting.facts import Facts
from greedynas.reporting.story import lead_verdict, verdicts
from greedynas.reporting.worth import worth

PYTHON = """import greedynas

network, card = greedynas.load_network({run!r})  # a torch.nn.Module, its classes and preprocessing
for prediction in greedynas.predict({run!r}, ["image.jpg"]):
    print(prediction.classes[0])  # (class, probability)"""
ONNX = """import json
import numpy as np, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession({file!r})
card = json.loads(session.get_modelmeta().custom_metadata_map["greedynas"])
size, side = card["image_size"], round(card["image_size"] / card["crop_fraction"])
image = ImageOps.exif_transpose(Image.open("image.jpg")).convert("L" if card["image_channels"] == 1 else "RGB")
image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
pixels = np.asarray(image, np.float32).reshape(side, side, -1)[(side - size) // 2:, (side - size) // 2:][:size, :size]
inputs = ((pixels / 255 - card["mean"]) / card["std"]).astype(np.float32).transpose(2, 0, 1)[None]
print(card["class_names"][session.run(["logits"], {{"images": inputs}})[0][0].argmax()])"""


@dataclass(frozen=True)
class Usage:
    """A way to use the found network: a tab of the report."""

    name: str
    code: str


def usages(facts: Facts) -> list[Usage]:
    """Return the ways to use the chosen network that work with the files of the run so far."""
    chosen = facts.chosen
    if chosen is None or chosen.test is None:
        return []
    run = str(facts.folder)
    found = [
        Usage("Command", f"greedynas predict {shlex.quote(run)} image.jpg"),
        Usage("Python", PYTHON.format(run=run)),
    ]
    if chosen.export is not None and any(file.file == "model.onnx" for file in chosen.export.files):
        found.append(Usage("ONNX", ONNX.format(file=f"{run}/model.onnx")))
    return found


def how_good(facts: Facts) -> str | None:
    """Return a sentence that compares the network with a rival, or says how to get one; None without a test.

    The comparison with random networks of the same budget is the best one, because it is about the search. Without it,
    the strongest other network of the run is the rival.
    """
    chosen = facts.chosen
    if chosen is None or chosen.test is None or chosen.test.withheld:
        return None
    if (sentence := worth(facts)) is not None:
        return sentence
    compared = verdicts(facts)
    if compared and lead_verdict(facts) is None:  # a rival that is ahead is named anyway
        return compared[0].text
    if compared:
        return None
    run = shlex.quote(str(facts.folder))
    return (
        "Nothing was trained the same way to compare this with. A random network within the same budget shows what the "
        f"search was worth: greedynas retrain {run} --arch random && greedynas report {run}"
    )
