"""Compare int8 LiteRT files of the space `micro` with the stated memory, and LiteRT's fast kernels with its reference kernels.

    python -m benchmarks.scripts.micro_litert --images FOLDER --out FOLDER/micro-litert

For random paths, `ram` is compared with the peak of the tensors of the file's graph, op by op with a tensor freed after
its last use (what an interpreter needs at least), and `flash` with the size of the file. The reference kernels compute as
those of microcontrollers. The networks are trained for some steps; `same_top1` is the share of images with the same class as PyTorch in fp32.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.scripts.deployment_formats import CALIBRATION, IMAGES, TRAINING, train_briefly
from greedynas import load_space
from greedynas.data.transforms import normalisation
from greedynas.deploy.formats.format import Conversion, make_format
from greedynas.deploy.prediction import make_input, read_square
from greedynas.deploy.runtimes.litert_model import Model
from greedynas.models.model_file import Card, make_network
from greedynas.runtime.rng import torch_stream
from greedynas.spaces.memory import memory_tables


class Reference(Model):
    """The same file in LiteRT's reference kernels."""

    reference = True


def graph_peak(file: Path) -> int:
    """Return the largest number of bytes of activations that are needed at an op of a file."""
    model = Reference(file, file.name)
    model.open(1)
    interpreter = model._interpreter
    sizes = {
        one["index"]: int(np.prod(one["shape"])) * np.dtype(one["dtype"]).itemsize
        for one in interpreter.get_tensor_details()
    }
    ops = interpreter._get_ops_details()
    made = {int(index) for op in ops for index in op["outputs"]} | {int(interpreter.get_input_details()[0]["index"])}
    last = {int(index): number for number, op in enumerate(ops) for index in op["inputs"] if int(index) in made}
    live, peak = {int(interpreter.get_input_details()[0]["index"])}, 0
    for number, op in enumerate(ops):
        live |= {int(index) for index in op["outputs"]}
        peak = max(peak, sum(sizes[index] for index in live))
        live = {index for index in live if last.get(index, -1) > number}
    return peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--paths", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    space, tables = load_space("micro"), memory_tables(load_space("micro"))
    files = sorted(file for file in options.images.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    files = [files[i] for i in np.random.default_rng(0).permutation(len(files))[: IMAGES + TRAINING]]
    mean, std = normalisation(3)
    rows = []
    for path in space.sample(options.paths, np.random.default_rng(0)):
        card = Card(
            name="micro",
            space=space,
            path=tuple(path.tolist()),
            class_names=tuple(f"class {i}" for i in range(10)),
            image_size=space.image_size,
            image_channels=3,
            crop_fraction=0.875,
            mean=mean,
            std=std,
        )
        network = make_network(card, torch_stream(0, "init"))
        inputs = torch.cat([make_input([read_square(file, card)], card) for file in files]).contiguous()
        folders = sorted({file.parent.name for file in files})
        labels = torch.tensor([folders.index(file.parent.name) % 10 for file in files])
        train_briefly(network.train(), inputs[IMAGES:], labels[IMAGES:])
        network.eval()
        with torch.no_grad():
            expected = network(inputs[:IMAGES]).argmax(1).numpy()
        source = Conversion(network, card, lambda inputs=inputs: iter(inputs[IMAGES : IMAGES + CALIBRATION].split(16)))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.int8.tflite")
            make_format("litert", converting=True).convert(source, "int8", file)
            fast, slow = Model(file, file.name), Reference(file, file.name)
            fast.open(1)
            slow.open(1)
            found, reference = (model.run(inputs[:IMAGES].numpy()) for model in (fast, slow))
            rows.append(
                {
                    "path": path.tolist(),
                    "ram": int(tables["ram"](path[None])[0]),
                    "graph_peak": graph_peak(file),
                    "flash": int(tables["flash"](path[None])[0]),
                    "file_bytes": file.stat().st_size,
                    "largest_logit_difference_of_kernels": float(np.abs(found - reference).max()),
                    "step_of_logits": float(slow._output["quantization"][0]),
                    "same_top1_of_kernels": float((found.argmax(1) == reference.argmax(1)).mean()),
                    "same_top1_of_fast_kernels": float((found.argmax(1) == expected).mean()),
                    "same_top1": float((reference.argmax(1) == expected).mean()),
                }
            )
        print(json.dumps(rows[-1]), flush=True)
    (options.out / "micro.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
