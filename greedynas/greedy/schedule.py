"""What is due at which step of supernet training, and what the whole of it costs, counted as in Table 1 of the paper."""

import itertools
import math
from dataclasses import dataclass

from greedynas.greedy.settings import TrainSettings

PAPER_RATIO = 3.33  # cost of a training step over a forward pass, wherever methods are matched by cost


@dataclass(frozen=True)
class Schedule:
    """Everything depends on `max_epochs`, not on when training really stops."""

    settings: TrainSettings
    train_images: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.train_images // self.settings.batch_size)

    @property
    def steps(self) -> int:
        return self.settings.max_epochs * self.steps_per_epoch

    @property
    def supernets(self) -> list[range]:
        """The steps of each supernet, in whole epochs. Warm-up, learning rate and ε start again with each of them."""
        epochs = self.settings.max_epochs
        count = min(self.settings.supernets, epochs)
        bounds = [epochs * i // count * self.steps_per_epoch for i in range(count + 1)]
        return [range(first, end) for first, end in itertools.pairwise(bounds)]

    def supernet(self, step: int) -> range:
        """The steps of the supernet that a step trains; after the last step, of the last one."""
        return next((steps for steps in self.supernets if step < steps.stop), self.supernets[-1])

    @property
    def warmup(self) -> int:
        """Steps of uniform sampling, without filtering and pool updates."""
        return sum(self._warm(steps) - steps.start for steps in self.supernets)

    def _warm(self, steps: range) -> int:
        """The first step after a supernet's warm-up."""
        warmup = self.settings.warmup
        return steps.start + (round(warmup * len(steps)) if isinstance(warmup, float) else warmup)

    @property
    def snapshots(self) -> frozenset[int]:
        """Steps after which a supernet is kept for the search, besides the last one."""
        count, kept = self.settings.snapshots, set()
        for steps in self.supernets:
            first = min(self._warm(steps), steps.stop)
            kept |= {first + (steps.stop - first) * i // count for i in range(1, count + 1)}
        return frozenset(kept - {0, self.steps})

    def lr(self, step: int) -> float:
        """Cosine decay from the initial value to the final one; while the rate warms up, this part of it."""
        first, last = self.settings.lr, self.settings.lr * self.settings.lr_end
        steps = self.supernet(step)
        done = step - steps.start
        warm = min(1, (done + 1) / (round(self.settings.lr_warmup * len(steps)) + 1))
        return warm * (last + (first - last) * 0.5 * (1 + math.cos(math.pi * done / len(steps))))

    def epsilon(self, step: int) -> float:
        """Probability of sampling from the pool: linear from 0 at the end of warm-up to its level at the last step."""
        steps = self.supernet(step)
        warm = self._warm(steps)
        if not self.settings.pool_sampling or step <= warm:
            return 0.0
        return self.settings.epsilon * (step - warm) / max(steps.stop - 1 - warm, 1)

    def filters(self, step: int) -> bool:
        """Whether paths are evaluated before they are trained: to filter them, or for the pool that other switches use."""
        return self._needs_losses and step >= self._warm(self.supernet(step))

    @property
    def _needs_losses(self) -> bool:
        settings = self.settings
        used = settings.filtering or settings.pool_sampling or settings.stopping
        return settings.sampler == "greedy" and used

    def filterings(self, steps: int) -> int:
        """How often paths are evaluated in the first steps."""
        if not self._needs_losses:
            return 0
        warm = [max(min(steps, supernet.stop) - self._warm(supernet), 0) for supernet in self.supernets]
        return sum(math.ceil(filtered / self.settings.k) for filtered in warm)

    def predicted_images(self, epochs: int | None = None, num_ops: int = 1) -> tuple[int, int]:
        """(optimization, evaluation) images of a training that stops after so many epochs, without repeated paths."""
        settings = self.settings
        steps = (epochs or settings.max_epochs) * self.steps_per_epoch
        batch = min(settings.batch_size, self.train_images)
        optimization = steps * batch * (num_ops if settings.sampler == "fair" else 1)
        paths = self.filterings(steps) * (settings.m if settings.filtering else settings.k)
        calibration = min(settings.calibration_images, self.train_images) if settings.bn == "recalibrate" else 0
        return optimization, paths * (settings.filter_images + calibration)


def corrected_images(optimization: float, evaluation: float, ratio: float = PAPER_RATIO) -> float:
    """Table 1's "corrected #optimization"."""
    return optimization + evaluation / ratio


def epochs_within(settings: TrainSettings, train_images: int, corrected: float, num_ops: int) -> int:
    """The most epochs whose corrected cost stays within so many images; 0 where even one costs more."""

    def cost(epochs: int) -> float:
        schedule = Schedule(settings.model_copy(update={"max_epochs": epochs}), train_images)
        return corrected_images(*schedule.predicted_images(num_ops=num_ops))

    low, high = 0, 1
    while cost(high) <= corrected:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= corrected else (low, middle)
    return low


def supplement_corrected_images() -> float:
    """The supplement's own example, with its rounding: 46 epochs of 1.23M images, no warm-up. It prints 89.7M."""
    optimization = 1.23e6
    evaluation = round(1.23 * 1000 / 1024 * 10 / 5, 2) * 1e6  # 2.40M
    return corrected_images(optimization * 46, evaluation * 46)
