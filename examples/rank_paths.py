"""Load the supernet of a run and rank ten paths by their accuracy on validation images.

python examples/rank_paths.py runs/photos
python examples/rank_paths.py --quick          # trains a small supernet first
"""

import sys
import tempfile

import numpy as np

import greedynas

if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--quick"]):
        folder = tempfile.mkdtemp()
        quick = {"data.val_images": 0.7, "train.max_epochs": 3, "train.batch_size": 16}
        greedynas.train("fashion", folder, changes=quick if sys.argv[1:] else None)
    else:
        folder = sys.argv[1]
    run, net = greedynas.open_run(folder), greedynas.load_supernet(folder)
    paths = [tuple(path) for path in net.space.sample(10, np.random.default_rng(0)).tolist()]
    images, labels = run.data().val.eval_batch()
    result = greedynas.evaluate_paths(net, paths, images, labels)
    for place in result.accuracies.argsort()[::-1]:
        print(f"{result.accuracies[place]:.1%}", *greedynas.op_names(paths[place], net.space))
