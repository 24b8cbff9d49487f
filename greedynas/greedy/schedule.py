"""What is due at which step of supernet training, and what the whole of it costs, counted as in Table 1 of the paper."""

import math
from dataclasses import dataclass

from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.settings import TrainSettings
from greedynas.models.batchnorm import calibrates
from greedynas.spaces.space import Space

PAPER_RATIO = 3.33  # cost of a training step over a forward pass, wherever methods are matched by cost


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training. Everything depends on `max_epochs`, not on when training really stops."""

    settings: TrainSettings
    train_images: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.train_images // self.settings.batch_size)

    @property
    def steps(self) -> int:
        return self.settings.max_epochs * self.steps_per_epoch

    @property
    def warmup(self) -> int:
        """Steps of uniform sampling, without filtering and pool updates."""
        warmup = self.settings.warmup
        return round(warmup * self.steps) if isinstance(warmup, float) else warmup

    def lr(self, step: int) -> float:
        """Return the learning rate: cosine decay from the initial value to the final one, times how far it has warmed up."""
        first, last = self.settings.lr, self.settings.lr * self.settings.lr_end
        warm = min(1, (step + 1) / (round(self.settings.lr_warmup * self.steps) + 1))
        return warm * (last + (first - last) * 0.5 * (1 + math.cos(math.pi * step / self.steps)))

    def epsilon(self, step: int) -> float:
        """Return the probability of sampling from the pool: linear from 0 at the end of warm-up to its level at the last step."""
        if not self.settings.pool_sampling or step <= self.warmup:
            return 0.0
        return self.settings.epsilon * (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)

    def filters(self, step: int) -> bool:
        """Return whether paths are evaluated before they are trained: to filter them, or for the pool that other switches use."""
        return self._needs_losses and step >= self.warmup

    @property
    def _needs_losses(self) -> bool:
        settings = self.settings
        used = settings.filtering or settings.pool_sampling or settings.stopping
        return used and make_sampler(settings.sampler).filters

    def filterings(self, steps: int) -> int:
        """Return how often paths are evaluated in the first steps."""
        return math.ceil(max(steps - self.warmup, 0) / self.settings.k) if self._needs_losses else 0

    def predicted_images(self, epochs: int | None = None, space: Space | None = None) -> tuple[int, int]:
        """Return the (optimization, evaluation) images of a training, without repeated paths.

        Args:
            epochs: When it stops; None: at `max_epochs`.
            space: Of the supernet, which decides how many paths an update of some samplers trains; None: one.
        """
        settings = self.settings
        steps = (epochs or settings.max_epochs) * self.steps_per_epoch
        batch = min(settings.batch_size, self.train_images)
        trained = 1 if space is None else make_sampler(settings.sampler).paths_per_update(space)
        paths = self.filterings(steps) * (settings.m if settings.filtering else settings.k)
        calibration = min(settings.calibration_images, self.train_images) if calibrates(settings.bn) else 0
        return steps * batch * trained, paths * (settings.filter_images + calibration)


def corrected_images(optimization: float, evaluation: float, ratio: float = PAPER_RATIO) -> float:
    """Return Table 1's "corrected #optimization"."""
    return optimization + evaluation / ratio


def epochs_within(settings: TrainSettings, train_images: int, corrected: float, space: Space) -> int:
    """Return the most epochs whose corrected cost stays within a number of images; 0 where even one costs more."""

    def cost(epochs: int) -> float:
        schedule = Schedule(settings.model_copy(update={"max_epochs": epochs}), train_images)
        return corrected_images(*schedule.predicted_images(space=space))

    low, high = 0, 1
    while cost(high) <= corrected:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= corrected else (low, middle)
    return low


def supplement_corrected_images() -> float:
    """Return the supplement's own example, with its rounding: 46 epochs of 1.23M images, no warm-up. It prints 89.7M."""
    optimization = 1.23e6
    evaluation = round(1.23 * 1000 / 1024 * 10 / 5, 2) * 1e6  # 2.40M
    return corrected_images(optimization * 46, evaluation * 46)
