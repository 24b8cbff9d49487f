"""Make greedynas/data/fashion.npz, the sample of Fashion-MNIST that ships with the package.

    apt-get install dataset-fashion-mnist
    python tools/make_fashion_sample.py /usr/share/datasets/fashion-mnist greedynas/data/fashion.npz

The sample has 800 training and 200 test images of each class, drawn with a fixed seed from the original training and
test files, in their original order. The pixels are unchanged.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

SEED = 0
PER_CLASS = {"train": ("train", 800), "test": ("t10k", 200)}


def read_idx(file: Path) -> np.ndarray:
    """Return the array of an IDX file, which has a magic number with the number of dimensions, the dimensions, and
    bytes."""
    data = gzip.decompress(file.read_bytes())
    dimensions = data[3]
    shape = np.frombuffer(data, ">u4", count=dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def sample(folder: Path, prefix: str, per_class: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
    chosen = [rng.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in range(10)]
    rows = np.sort(np.concatenate(chosen))
    return images[rows], labels[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with the four files of Fashion-MNIST")
    parser.add_argument("target", type=Path, help="the .npz to write")
    arguments = parser.parse_args()
    rng = np.random.default_rng(SEED)
    arrays = {}
    for split, (prefix, per_class) in PER_CLASS.items():
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = sample(arguments.source, prefix, per_class, rng)
    np.savez_compressed(arguments.target, **arrays)
    print(f"{arguments.target}: {arguments.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
