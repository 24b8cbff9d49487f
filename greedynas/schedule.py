"""What is due at which step of supernet training, and what the whole of it costs, counted as in Table 1 of the paper."""

import math
from dataclasses import dataclass

from greedynas.config import TrainSettings

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
    def warmup(self) -> int:
        """Steps of uniform sampling, without filtering and pool updates."""
        warmup = self.settings.warmup
        return round(warmup * self.steps) if isinstance(warmup, float) else warmup

    @property
    def snapshots(self) -> frozenset[int]:
        """Steps after which a supernet is kept for the search, besides the last one."""
        first, count = min(self.warmup, self.steps), self.settings.snapshots
        return frozenset(first + (self.steps - first) * i // count for i in range(1, count)) - {0, self.steps}

    def lr(self, step: int) -> float:
        """Cosine decay from the initial value to the final one."""
        first, last = self.settings.lr, self.settings.lr * self.settings.lr_end
        return last + (first - last) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def epsilon(self, step: int) -> float:
        """Probability of sampling from the pool: linear from 0 at the end of warm-up to its level at the last step."""
        if not self.settings.pool_sampling or step <= self.warmup:
            return 0.0
        return self.settings.epsilon * (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)

    def filters(self, step: int) -> bool:
        """Whether paths are evaluated before they are trained: to filter them, or for the pool that other switches use."""
        settings = self.settings
        used = settings.filtering or settings.pool_sampling or settings.stopping
        return settings.sampler == "greedy" and used and step >= self.warmup

    def predicted_images(self, epochs: int | None = None, num_ops: int = 1) -> tuple[int, int]:
        """(optimization, evaluation) images of a training that stops after so many epochs, without repeated paths."""
        settings = self.settings
        steps = (epochs or settings.max_epochs) * self.steps_per_epoch
        batch = min(settings.batch_size, self.train_images)
        optimization = steps * batch * (num_ops if settings.sampler == "fair" else 1)
        if not self.filters(self.steps):
            return optimization, 0
        paths = math.ceil(max(steps - self.warmup, 0) / settings.k) * (settings.m if settings.filtering else settings.k)
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
