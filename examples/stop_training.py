"""End a training by a callback as soon as one path is good enough.

    python examples/stop_training.py --quick

On the command line, register the class with `@greedynas.register_callback("good-enough")` and use --callback
good-enough.
"""

import sys
import tempfile

import greedynas


class GoodEnough(greedynas.Callback):
    """Stops when the best path of the candidate pool has a small enough loss."""

    def __init__(self, loss):
        self.loss = loss

    def stop(self, state):
        best = state.pool.best(1)  # the best path and its loss
        return f"a path has a loss of {best[0][1]:.2f}" if best and best[0][1] <= self.loss else None


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    changes = {"data.val_images": 0.8, "train.batch_size": 16, "train.warmup": 100} if quick else None
    enough = GoodEnough(loss=1.0 if quick else 0.3)
    run = greedynas.train("fashion", tempfile.mkdtemp(), changes=changes, callbacks=[enough])
    print(run)
    print(f"{run.epochs} of {run.config.train.max_epochs} epochs: {run.facts.training.epochs[-1].stopped}")
    assert run.epochs < run.config.train.max_epochs
