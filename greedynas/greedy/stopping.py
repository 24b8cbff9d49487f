"""The stopping principle of the paper: π ≤ α."""

from greedynas.greedy.schedule import Schedule
from greedynas.greedy.state import TrainState


def why_stop(state: TrainState, schedule: Schedule) -> str | None:
    """The stopping principle, at the end of an epoch: few new paths in a full pool since the end of the epoch before. Of
    several supernets the last one alone may stop early."""
    settings, last = schedule.settings, state.epoch * schedule.steps_per_epoch > schedule.supernets[-1].start
    if settings.stopping and last and state.novelty is not None and state.novelty <= settings.alpha:
        return f"the pool is steady (π = {state.novelty:.3f} ≤ {settings.alpha})"
    return "max_epochs reached" if state.epoch >= settings.max_epochs else None
