"""Out of memory, in one line that says what would fit. To find out is cheap: the same work with half as many images."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks

_CPU = ("not enough memory", "can't allocate memory", "DefaultCPUAllocator")  # what torch says where there is no class


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the CPU, which torch tells by its message alone."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CPU)


@contextmanager
def telling_what_fits(setting: str, size: int, trial: Callable[[int], object], otherwise: str) -> Iterator[None]:
    """Turn running out of memory into a line that names the largest half, quarter… of `size` images with which `trial` goes.

    Where the whole of `size` goes, the fault lies elsewhere: `otherwise` says what to lower.
    """
    try:
        yield
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the batch that was too large, and its activations
    shares = ranks.size()  # each has its share of the images, and this one tries alone
    with ranks.alone():
        fits = largest_that_fits(size, lambda images: trial(max(2, images // shares)))
    if fits == size:
        raise GreedyNASError(f"out of memory, though {setting} = {size} fits alone: {otherwise}; nothing saved is lost")
    if fits is None:
        raise GreedyNASError(f"out of memory with {setting} = {size}, and not even 2 images fit; nothing saved is lost")
    raise GreedyNASError(
        f"out of memory with {setting} = {size}; {fits} fits here: set {setting}={fits} (and a smaller learning rate) in "
        "another --out, or use a device with more memory; nothing saved is lost"
    )


def training_trial(
    forward: Callable[[Tensor], Tensor], channels: int, size: int, device: torch.device, precision: str
) -> Callable[[int], None]:
    """Return a trial: a forward and a backward pass on a rank's share of so many images of this shape."""
    shares = ranks.size()

    def trial(images: int) -> None:
        batch = torch.zeros(-(-images // shares), channels, size, size, device=device)
        with autocast(device, precision):
            logits = forward(batch)
        full_precision(logits).square().mean().backward()

    return trial


def largest_that_fits(size: int, trial: Callable[[int], object]) -> int | None:
    """Of size, size / 2, size / 4… down to 2: the first with which the trial does not run out of memory."""
    while size >= 2:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        try:
            with ranks.alone():  # the other ranks are not there to answer
                trial(size)
            return size
        except Exception as error:
            if not is_out_of_memory(error):
                return None
        size //= 2
    return None
