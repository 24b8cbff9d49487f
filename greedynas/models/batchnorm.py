"""The statistics that BatchNorm uses in evaluation: those of the batch, recalibrated ones, or the running averages.

A mode is a small class in the registry `BN_MODES`. It says how the BatchNorm modules of a network are set up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from greedynas.models.supernet import Supernet
from greedynas.runtime.registry import Registry

BN_MODES: "Registry[type[BatchNormMode]]" = Registry(
    "BatchNorm mode",
    {
        "batch": "greedynas.models.batchnorm:BatchStatistics",
        "recalibrate": "greedynas.models.batchnorm:Recalibrated",
        "running": "greedynas.models.batchnorm:BatchNormMode",
    },
)


class BatchNormMode:
    """Use the running averages that were kept in training (the paper's `eval()`), a mix over all paths.

    This is also the base class of the other modes.
    """

    calibrates = False  # whether the mode takes its statistics from calibration images
    changes: tuple[str, ...] = ()  # attributes of a BatchNorm module that `prepare` changes, besides `training`

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        """Set up one BatchNorm module and return the buffers that were created for it."""
        return []


class BatchStatistics(BatchNormMode):
    """Use the statistics of the evaluated images."""

    changes = ("track_running_stats",)

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        # In train mode without tracking, BatchNorm uses the statistics of the batch and updates no average.
        norm.training, norm.track_running_stats = True, False
        return []


class Recalibrated(BatchNormMode):
    """Use the statistics of training images, computed anew for every path."""

    calibrates = True
    changes = ("momentum", "running_mean", "running_var", "num_batches_tracked")

    @staticmethod
    def prepare(norm: nn.BatchNorm2d) -> list[Tensor]:
        norm.momentum = 1.0
        buffers = Recalibrated.changes[1:]
        for name in buffers:  # copies, which are discarded afterwards
            setattr(norm, name, getattr(norm, name).clone())
        return [getattr(norm, name) for name in buffers]


def calibrates(mode: str) -> bool:
    """Return whether a mode takes its statistics from calibration images."""
    return BN_MODES[mode].calibrates


@contextmanager
def bn_mode(net: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Evaluate a network with the statistics of a mode. Yield the buffers created for it, then restore the network."""
    # Filtering calls this every few steps, and a supernet has hundreds of modules: only what has to change is changed.
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
    """Run one block on images, with the statistics of calibration images if there are any, and return both outputs."""
    if calibration is None:
        return block(images), None
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
    calibration = block(calibration)  # the momentum is 1: the running statistics become those of these images
    for norm in norms:
        norm.eval()
    return block(images), calibration


def pooled(net: Supernet, images: Tensor, calibration: Tensor | None) -> Tensor:
    """Return the input of the classifier, computed from the output of the last layer."""
    if calibration is None:
        return net.pooled(images)
    features, _ = run_block(net.head, images, calibration)
    return net.through_neck(features.mean((2, 3)))
