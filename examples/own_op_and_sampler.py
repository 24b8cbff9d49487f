"""Add an op and a sampler: train a supernet with them, search it, and export the found network.

    python examples/own_op_and_sampler.py --quick
    greedynas train fashion --plugin examples/own_op_and_sampler.py --sampler sandwich --out runs/sandwich

The file is also a plugin: importing it only registers the op and the sampler.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import greedynas


@greedynas.register_op("GHOST_K3")
class Ghost(nn.Module):
    """A Ghost block (Han et al., CVPR 2020), which computes half of the channels from the other half by a depthwise
    op."""

    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        half = out_channels // 2
        self.keeps_shape = stride == 1 and in_channels == out_channels
        self.primary = nn.Sequential(
            nn.Conv2d(in_channels, half, 3, stride, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU()
        )
        self.cheap = nn.Sequential(
            nn.Conv2d(half, out_channels - half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(out_channels - half),
        )

    def forward(self, x):
        primary = self.primary(x)
        out = torch.cat([primary, self.cheap(primary)], 1)
        return x + out if self.keeps_shape else out


@greedynas.register_sampler("sandwich")
def sandwich(draw):
    """Train the most and the least expensive of 16 paths and two in the middle (the sandwich rule)."""
    paths = draw.uniform(16)
    order = draw.space.costs(paths).macs.argsort()
    return [paths[order[place]] for place in (-1, 0, 7, 8)]


SPACE = greedynas.Space(
    name="ghosts",
    image_size=28,
    image_channels=1,
    num_classes=10,
    ops=["ID", "MB3_K3", "GHOST_K3"],
    stem=[greedynas.Fixed(op="CONV_K3", channels=16, stride=2)],
    stages=[greedynas.Stage(channels=24, repeat=2, stride=2), greedynas.Stage(channels=48, repeat=2, stride=2)],
    head=[greedynas.Fixed(op="CONV_K1", channels=128)],
)


def check_costs(path):
    """Compare the costs of a path by the space with those that PyTorch counts."""
    network = greedynas.Supernet(SPACE).subnet(path).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, 1, 28, 28))
    costs = SPACE.costs([path])
    assert costs.macs[0] == counter.get_total_flops() // 2
    assert costs.params[0] == sum(parameter.numel() for parameter in network.parameters())
    print(f"{costs.macs[0]:,} multiply-adds and {costs.params[0]:,} parameters, as PyTorch counts them")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="The folder for the runs.")
    parser.add_argument("--quick", action="store_true", help="Train so little that it takes seconds.")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="greedynas-"))
    quick = {"data.val_images": 300, "train.max_epochs": 1} if options.quick else {}

    path = greedynas.parse_path("GHOST_K3 MB3_K3 GHOST_K3 ID", SPACE)
    check_costs(path)
    print(SPACE)  # in a notebook, SPACE alone shows a table, and greedynas.draw_path(path, SPACE) the network
    (out / "network.svg").write_text(greedynas.draw_path(path, SPACE))
    facts = greedynas.describe(SPACE, path)
    assert facts["ops"] == ["GHOST_K3", "MB3_K3", "GHOST_K3", "ID"]

    # Train with the sampler, search under a budget, retrain and export.
    changes = {"space": SPACE, "train.sampler": "sandwich", **quick}
    run = greedynas.train("fashion", out / "ghosts", changes=changes)
    run = greedynas.search_run(
        run, flops="450K", changes={"population": 8, "generations": 3} if options.quick else None
    )
    run = greedynas.retrain(run, changes={"epochs": 1} if options.quick else None)
    run = greedynas.export(run, formats=["onnx"])
    print(run, greedynas.op_names(run.best.arch.path, SPACE))
    assert run.best.arch.macs <= 450_000
    assert run.top1 > 0.5  # chance is 0.1
    network, card = greedynas.load_network(run.folder)
    assert network(torch.zeros(1, 1, 28, 28)).shape == (1, len(card.class_names))

    # Measure the latency of every block on this machine.
    table = greedynas.measure_latency(SPACE, "onnxruntime", repeats=2 if options.quick else 20)
    print(table, f"{table.price(path, SPACE):.3f} ms")

    # Train on the command line, with the plugin and the space as files.
    file = out / "ghosts.yaml"
    file.write_text(SPACE.to_yaml())
    arguments = ["train", "fashion", "--plugin", __file__, "--sampler", "sandwich", "--out", str(out / "by-command")]
    settings = {"space": file, **quick, **({"data.val_images": 0.9} if options.quick else {})}
    arguments += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([sys.executable, "-m", "greedynas", *arguments], check=True)
    assert greedynas.open_run(out / "by-command").config.train.sampler == "sandwich"
    print(greedynas.runs(out))


if __name__ == "__main__":
    main()
