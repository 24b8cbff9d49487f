"""The schedule of supernet training by step, and the cost of the whole training, counted as in Table 1 of the paper."""

import math
from dataclasses import dataclass

from greedynas.greedy.samplers.sampler import make_sampler
from greedynas.greedy.settings import TrainSettings
from greedynas.models.batchnorm import calibrates
from greedynas.spaces.space import Space

PAPER_RATIO = 3.33  # the paper's cost of a training step over a forward pass, used to match methods by cost


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training. It depends on `max_epochs`, not on the epoch in which training stops."""

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
        """Return the learning rate: cosine decay from the initial value to the final one, times a linear warm-up."""
        first, last = self.settings.lr, self.settings.lr * self.settings.lr_end
        warm = min(1, (step + 1) / (round(self.settings.lr_warmup * self.steps) + 1))
        return warm * (last + (first - last) * 0.5 * (1 + math.cos(math.pi * step / self.steps)))

    def epsilon(self, step: int) -> float:
        """Return the probability of sampling from the pool, which rises linearly from warm-up to the last step."""
        if not self.settings.pool_sampling or step <= self.warmup:
            return 0.0
        return self.settings.epsilon * (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)

    def progress(self, step: int) -> float:
        """Return how much of the training after warm-up is done, from 0 to 1."""
        return min(1.0, max(0.0, (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)))

    def filters(self, step: int) -> bool:
        """Return whether paths are evaluated before they are trained, to filter them or to keep the pool up to date."""
        return self._needs_losses and step >= self.warmup

    @property
    def _needs_losses(self) -> bool:
        settings = self.settings
        used = settings.filtering or settings.pool_sampling or settings.stopping
        return used and make_sampler(settings.sampler).filters

    def filterings(self, steps: int) -> int:
        """Return the number of filterings in the first `steps` steps."""
        return math.ceil(max(steps - self.warmup, 0) / self.settings.k) if self._needs_losses else 0

    def predicted_images(self, epochs: int | None = None, space: Space | None = None) -> tuple[int, int]:
        """Return the (optimization, evaluation) images of a training in which no path is sampled twice.

        Args:
            epochs: The epochs that are trained; None: `max_epochs`.
            space: The space of the supernet, by which some samplers train several paths per update; None: one path.
        """
        return self.images_until((epochs or self.settings.max_epochs) * self.steps_per_epoch, space)

    def images_until(self, steps: int, space: Space | None = None) -> tuple[int, int]:
        """Return the (optimization, evaluation) images of the first steps, see `predicted_images`."""
        settings = self.settings
        batch = min(settings.batch_size, self.train_images)
        trained = 1 if space is None else make_sampler(settings.sampler).paths_per_update(space)
        sampler, optimization = make_sampler(settings.sampler), steps * batch * trained
        paths = self.filterings(steps) * sampler.evaluates(settings)
        calibration = min(settings.calibration_images, self.train_images) if calibrates(settings.bn) else 0
        if space is not None:  # steps on architecture parameters
            optimization += max(steps - self.warmup, 0) * batch * sampler.learning_paths(space)
        watched = settings.accuracy_images * (steps // self.steps_per_epoch)
        return optimization, paths * (settings.filter_images + calibration) + watched


def corrected_images(optimization: float, evaluation: float, ratio: float = PAPER_RATIO) -> float:
    """Return the "corrected #optimization" of Table 1: an evaluation image counts as 1 / ratio training images."""
    return optimization + evaluation / ratio


def epochs_within(settings: TrainSettings, train_images: int, corrected: float, space: Space) -> int:
    """Return the largest number of epochs whose corrected cost is at most `corrected` images; 0 if one costs more."""

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
    """Return the cost of the supplement's example with its rounding: 46 epochs of 1.23M images, no warm-up (89.7M)."""
    optimization = 1.23e6
    evaluation = round(1.23 * 1000 / 1024 * 10 / 5, 2) * 1e6  # 2.40M
    return corrected_images(optimization * 46, evaluation * 46)
