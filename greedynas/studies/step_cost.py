"""The memory and the time of a training step, measured: the paper's Table 2 has memory as a column of its own.

On every device the tensors that autograd saves for the backward pass are counted, with torch's hooks for saved tensors. That is
what grows with the number of ops that are run together. Weights and their momentum, which all methods have, are not counted.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from greedynas.greedy.pool import CandidatePool
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.state import TrainState
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.greedy.training import Drawing
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import choose_device
from greedynas.runtime.stopwatch import clock
from greedynas.settings.schema import Config
from greedynas.stages.run import choose_precisions, set_up, supernet_of
from greedynas.stages.train import settings_for
from greedynas.studies.study import Part
from greedynas.studies.supernets import FREE_KEYS, settings_of_training, shared_data

UPDATES = 6  # that are measured; their paths differ, so that the mean is reported


class SavedTensors:
    """Counts the bytes that autograd holds for backward passes while it is active, and their largest sum.

    Several tensors in the same storage are counted once, and the weights of a network not at all.
    """

    def __init__(self, net: nn.Module):
        self._weights = {one.untyped_storage().data_ptr() for one in (*net.parameters(), *net.buffers())}
        self._held: Counter[int] = Counter()
        self.now = self.peak = 0
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> "Tensor | _Held":
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return tensor
        if not self._held[storage.data_ptr()]:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._held[storage.data_ptr()] += 1
        return _Held(self, tensor.detach())  # detached: a saved output would otherwise keep its own graph alive

    @staticmethod
    def _unpack(held: "Tensor | _Held") -> Tensor:
        return held.tensor if isinstance(held, _Held) else held

    def release(self, storage: torch.UntypedStorage) -> None:
        """Count one holder of a storage less."""
        self._held[storage.data_ptr()] -= 1
        if not self._held[storage.data_ptr()]:
            del self._held[storage.data_ptr()]
            self.now -= storage.nbytes()


class _Held:
    """A saved tensor, which is counted until autograd lets it go."""

    def __init__(self, counted_by: SavedTensors, tensor: Tensor):
        self.counted_by, self.tensor = counted_by, tensor

    def __del__(self) -> None:
        self.counted_by.release(self.tensor.untyped_storage())


def step_part(name: str, config: Config) -> Part:
    """Return the part that measures the memory and the time of a method's updates."""
    settings = {"config": settings_of_training(config, 0)}
    return Part(f"step-{name}", measure_method, settings, FREE_KEYS)


def measure_method(_: Path, settings: dict[str, Any], __: Console) -> dict[str, Any]:
    """Measure updates in the middle of a training with these settings, on the images of the run."""
    config = Config.model_validate(settings["config"])
    device = set_up(config)
    data = shared_data(config, choose_device(config.device))
    train = settings_for(config, data)[0]
    net = supernet_of(config, len(data.class_names), device).train()
    schedule = Schedule(train, len(data.train))
    state = TrainState(CandidatePool(train.pool_size), step=(schedule.warmup + schedule.steps) // 2)
    precision, eval_precision = choose_precisions(config, device)
    draw = Drawing(net, data, schedule, config.seed, precision, eval_precision)
    step = TrainingStep(net, supernet_optimizer(net, train), train, data.class_weights, precision)
    batches = data.train.train_batches(0, train.batch_size)
    images, labels = next(iter(batches))

    def update() -> None:
        if not state.waiting:
            state.waiting = list(draw(state).updates)
        step(images, labels, state.waiting.pop(0), schedule.lr(state.step))

    return {**measured_updates(update, net, device), "batch": len(labels), "image_size": config.space.image_size}


def measured_updates(update: Callable[[], None], net: nn.Module, device: torch.device) -> dict[str, float]:
    """Return the mean peak of saved bytes and the median seconds of some updates, after one that is not counted."""
    update()
    peaks, seconds = [], []
    for _ in range(UPDATES):
        with SavedTensors(net) as saved:
            update()
        peaks.append(saved.peak)
    for _ in range(UPDATES):
        seconds.append(clock(update, device)[0])
    weights = sum(parameter.nbytes for parameter in net.parameters())
    return {
        "step_memory": statistics.fmean(peaks),
        "step_seconds": statistics.fmean(seconds),
        "weights": weights,
    }


def path_memory(net: Supernet, images: Tensor, path: Any) -> int:
    """Return the bytes that autograd saves for a forward pass of a path or a mixture."""
    with SavedTensors(net) as saved:
        loss = net(images, path).sum()
    held = saved.now
    del loss
    return held
