"""BatchNorm statistics in evaluation: of the batch, recalibrated for the path, or the running averages.

A mode is a small class in the registry `BN_MODES`, which says how the BatchNorm modules of a net are set up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from greedynas.models.supernet import Supernet
from greedynas.runtime.registry import Registry

BN_MODES: "Registry[type[BatchNormMode]]" = Registry(
    "BatchNorm mode",
    {
        "batch": "greedynas.models.batchnorm:OfTheBatch",
        "recalibrate": "greedynas.models.batchnorm:Recalibrated",
        "running": "greedynas.models.batchnorm:BatchNormMode",
    },
)


class BatchNormMode:
    """The running averages that were kept in training: the paper's `eval()`, a mix over all paths."""

    calibrates = False  # whether it takes its statistics from training images that are given to it
    changes: tuple[str, ...] = ()  # attributes of a BatchNorm module that `prepare` changes, besides `training`

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        """Set up one BatchNorm module and return the buffers that were made for it."""
        return []


class OfTheBatch(BatchNormMode):
    """The statistics of the evaluated images themselves."""

    changes = ("track_running_stats",)

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        # In train mode without tracking, BatchNorm uses the batch and remembers nothing.
        norm.training, norm.track_running_stats = True, False
        return []


class Recalibrated(BatchNormMode):
    """The statistics of training images, taken anew for every path."""

    calibrates = True
    changes = ("momentum", "running_mean", "running_var", "num_batches_tracked")

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        norm.momentum = 1.0
        buffers = Recalibrated.changes[1:]
        for name in buffers:  # copies, which are thrown away
            setattr(norm, name, getattr(norm, name).clone())
        return [getattr(norm, name) for name in buffers]


def calibrates(mode: str) -> bool:
    """Return whether a mode takes its statistics from calibration images."""
    return BN_MODES[mode].calibrates


@contextmanager
def bn_mode(net: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Evaluate with the statistics of a mode; yield the buffers made for it. Afterwards the net is as it was before."""
    # Filtering comes this way every few steps, and a supernet has hundreds of modules: nothing is touched needlessly.
    mode = BN_MODES[name]
    modules = list(net.modules())
    norms = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
    training = [module for module in modules if module.training]
    kept = [[getattr(norm, attribute) for attribute in mode.changes] for norm in norms]
    try:
        for module in training:
            module.training = False
        yield [buffer for norm in norms for buffer in mode.prepare(norm)]
    finally:
        for norm, values in zip(norms, kept, strict=True):
            norm.training = False
            for attribute, value in zip(mode.changes, values, strict=True):
                setattr(norm, attribute, value)
        for module in training:
            module.training = True


def run_block(block: nn.Module, images: Tensor, calibration: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run one block. With calibration images, the images are normalised by the statistics of these."""
    if calibration is None:
        return block(images), None
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
    calibration = block(calibration)  # momentum is 1 here: the running statistics become those of these images
    for norm in norms:
        norm.eval()
    return block(images), calibration


def pooled(net: Supernet, images: Tensor, calibration: Tensor | None) -> Tensor:
    """Return what the classifier sees, from the output of the last layer."""
    if calibration is None:
        return net.pooled(images)
    features, _ = run_block(net.head, images, calibration)
    return features.mean((2, 3))
