"""BatchNorm statistics in evaluation: of the batch, recalibrated for the path, or the running averages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from greedynas.models.supernet import Supernet

BNMode = Literal["batch", "recalibrate", "running"]
BN_MODES: tuple[BNMode, ...] = ("batch", "recalibrate", "running")


def pooled(net: Supernet, images: Tensor, calibration: Tensor | None) -> Tensor:
    """From the last layer's output to what the classifier sees."""
    if calibration is None:
        return net.pooled(images)
    features, _ = run_block(net.head, images, calibration)
    return features.mean((2, 3))


def run_block(block: nn.Module, images: Tensor, calibration: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One block. With calibration images, their statistics are taken first and the images are normalised by them."""
    if calibration is None:
        return block(images), None
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
    calibration = block(calibration)  # momentum is 1 here: the running statistics become those of these images
    for norm in norms:
        norm.eval()
    return block(images), calibration


CHANGED: dict[BNMode, tuple[str, ...]] = {  # attributes of BatchNorm modules, besides `training`
    "batch": ("track_running_stats",),
    "recalibrate": ("momentum", "running_mean", "running_var", "num_batches_tracked"),
    "running": (),
}


@contextmanager
def bn_mode(net: nn.Module, mode: BNMode) -> Iterator[list[Tensor]]:
    """Evaluate with these statistics; afterwards every module and every buffer is as it was. Yields buffers made for it."""
    # Filtering comes this way every few steps, and a supernet has hundreds of modules: nothing is touched needlessly.
    modules = list(net.modules())
    norms = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
    training = [module for module in modules if module.training]
    kept = [[getattr(norm, name) for name in CHANGED[mode]] for norm in norms]
    made: list[Tensor] = []
    try:
        for module in training:
            module.training = False
        for norm in norms:
            if mode == "batch":  # in train mode without tracking, BatchNorm uses the batch and remembers nothing
                norm.training, norm.track_running_stats = True, False
            elif mode == "recalibrate":  # written into copies, which are thrown away
                norm.momentum = 1.0
                for name in CHANGED[mode][1:]:
                    setattr(norm, name, getattr(norm, name).clone())
                    made.append(getattr(norm, name))
        yield made
    finally:
        for norm, values in zip(norms, kept, strict=True):
            norm.training = False
            for name, value in zip(CHANGED[mode], values, strict=True):
                setattr(norm, name, value)
        for module in training:
            module.training = True
