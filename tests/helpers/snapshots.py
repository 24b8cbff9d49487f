"""Test helpers shared by `tests.experimental.test_snapshots` and others."""

import numpy as np
import pytest

from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.settings import SearchSettings
from greedynas.rundir import checkpointing
from greedynas.rundir.checkpoints import load_weights, read_checkpoint, step_of
from tests.helpers.training import new_net, recorded

PATHS = [(0, 0, 0, 0), (1, 2, 1, 0), (2, 1, 0, 2), (0, 2, 2, 1)]
FOUR = {"experimental": {"snapshots": 4}, "max_epochs": 5}


def checkpoints(run):
    return {step_of(file): file for file in sorted((run / "supernet").glob("step-*.safetensors"))}


def plain_accuracies(data, file):
    """Return the accuracies of one checkpoint by `evaluate_paths`."""
    net = new_net()
    load_weights(net, read_checkpoint(file)[0])
    images, labels = data.val.eval_batch(np.arange(len(data.val)))
    return evaluate_paths(net, PATHS, images, labels, bn_images=SearchSettings().bn_images).accuracies


def killed_and_resumed(folder, data, stop_after, monkeypatch, **settings):
    """Interrupt a training after `stop_after` steps, and start it again."""
    due = checkpointing.Checkpointing.if_due

    def stopping(self, path=None):
        due(self, path)
        if self.journal.state.step == stop_after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing.Checkpointing, "if_due", stopping)
        with pytest.raises(KeyboardInterrupt):
            recorded(folder, data, **settings)
    recorded(folder, data, **settings)
