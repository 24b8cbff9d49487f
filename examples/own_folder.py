"""Find a network for a folder of images: the whole job of the README in Python.

    python examples/own_folder.py --data photos/ --flops 5M --out runs/photos
    python examples/own_folder.py --quick          # draws its own images, a minute or less on a CPU

Repeating a command continues an interrupted run.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import greedynas


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="A folder of class folders. By default, images are drawn.")
    parser.add_argument("--flops", default="5M", help="The limit on multiply-adds.")
    parser.add_argument("--out", type=Path, help="The run directory.")
    parser.add_argument("--quick", action="store_true", help="Train so little that it takes seconds.")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="greedynas-"))
    out, images = options.out or scratch / "runs" / "photos", options.data
    if images is None:
        from shapes import draw_folder

        images = draw_folder(scratch / "photos", 60 if options.quick else 400)

    # 1. Train a supernet, search it, retrain the found network, export it and write the report.
    changes = {"space": "pocket", "image_size": 32, "train.max_epochs": 3, "train.batch_size": 16}
    changes |= {"search.population": 8, "search.generations": 3, "retrain.epochs": 25, "retrain.batch_size": 16}
    run = greedynas.run("auto", out, data=images, flops=options.flops, changes=changes if options.quick else None)
    print(run)  # RunRecord('…', exported, …% top-1)
    print("Report:", run.folder / "report.html")

    # 2. Look at the found network.
    found = run.best
    print(f"{found.name}: {found.arch.macs:,} multiply-adds, {found.arch.params:,} parameters")
    assert found.arch.macs <= greedynas.parse_count(options.flops)

    # 3. Classify images.
    pictures = sorted(images.rglob("*.png"))[:3] or sorted(images.rglob("*.jpg"))[:3]
    for prediction in greedynas.predict(out, pictures, top=1):
        (name, probability), *_ = prediction.classes
        print(f"{prediction.file.parent.name}/{prediction.file.name}: {name} ({probability:.0%})")

    # 4. Use the network like any other PyTorch module.
    network, card = greedynas.load_network(out)
    logits = network(torch.zeros(1, card.image_channels, card.image_size, card.image_size))
    assert logits.shape == (1, len(card.class_names))
    print("Classes:", ", ".join(card.class_names))

    # 5. Compare all runs of a folder.
    print(greedynas.runs(out.parent))


if __name__ == "__main__":
    main()
