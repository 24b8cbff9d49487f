"""Train a supernet on any torch Dataset of (image, label).

    python examples/own_dataset.py --quick
    greedynas run auto --data shapes --plugin examples/own_dataset.py --flops 5M --out runs/shapes

A registered data set has a name by which every stage finds it. A data set without a name is passed as an object,
`greedynas.train("cifar10", out, data=dataset)`, and again to every later stage.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

import greedynas

sys.path.append(str(Path(__file__).parent))  # so that the import also works if this file is loaded as a plugin
from shapes import CLASSES, draw_shape


@greedynas.register_dataset("shapes")
class Shapes(Dataset):
    """Images that are drawn on access."""

    classes = CLASSES

    def __len__(self):
        return 300 if "--quick" in sys.argv else 3000

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        label = index % len(self.classes)
        return draw_shape(self.classes[label], np.random.default_rng(index)), label


if __name__ == "__main__":
    changes = {"space": "pocket", "image_size": 32, "train.max_epochs": 2} if "--quick" in sys.argv else None
    run = greedynas.train("auto", tempfile.mkdtemp(), data="shapes", changes=changes)
    data = run.data()
    assert len(data.train) + len(data.val) + len(data.test()) == len(Shapes())
    print(run, len(data.train), len(data.val), data.class_names)
