"""Out-of-memory errors as one line that says which batch size would fit, found by trying smaller batches."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks

_CPU = (
    "not enough memory",
    "can't allocate memory",
    "DefaultCPUAllocator",
)  # messages of torch's errors that have no class of their own


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the CPU (by the message of torch's error) is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CPU)


@contextmanager
def suggesting_what_fits(setting: str, size: int, trial: Callable[[int], object], otherwise: str) -> Iterator[None]:
    """Replace an out-of-memory error by one line with the largest of size, size / 2, size / 4… that `trial` can handle.

    If `trial` can handle the whole of `size`, the cause lies elsewhere, and `otherwise` says what to lower.
    """
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the batch that was too large, and its activations
    shares = ranks.size()  # each rank has a share of the images, and this rank tries without the others
    with ranks.alone():
        fits = largest_that_fits(size, lambda images: trial(max(2, images // shares)))
    if fits == size:
        raise GreedyNASError(
            f"out of memory, though {setting} = {size} fits by itself: {otherwise}; nothing saved is lost"
        )
    if fits is None:
        raise GreedyNASError(f"out of memory with {setting} = {size}, and not even 2 images fit; nothing saved is lost")
    raise GreedyNASError(
        f"out of memory with {setting} = {size}; {fits} fits here: set {setting}={fits} (and a smaller learning rate) in "
        "another --out, or use a device with more memory; nothing saved is lost"
    )


def training_trial(
    forward: Callable[[Tensor], Tensor], channels: int, size: int, device: torch.device, precision: str
) -> Callable[[int], None]:
    """Return a trial that runs a forward and a backward pass on a rank's share of a number of images of this shape."""
    shares = ranks.size()

    def trial(images: int) -> None:
        batch = torch.zeros(-(-images // shares), channels, size, size, device=device)
        with autocast(device, precision):
            logits = forward(batch)
        full_precision(logits).square().mean().backward()

    return trial


def largest_that_fits(size: int, trial: Callable[[int], object]) -> int | None:
    """Return the first of size, size / 2, size / 4… down to 2 for which the trial has enough memory, else None."""
    while size >= 2:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        try:
            with ranks.alone():  # the other ranks do not take part in the trial
                trial(size)
            return size
        except Exception as error:
            if not is_out_of_memory(error):
                return None
        size //= 2
    return None
