"""The paper's stopping principle (section 4.1.2): training ends when the candidate pool is steady, π ≤ α."""

from greedynas.greedy.settings import TrainSettings
from greedynas.greedy.state import TrainState


def update_novelty(state: TrainState) -> None:
    """Compute π at the end of an epoch: the share of a full pool that is new since the end of the previous epoch."""
    state.novelty = state.pool.novelty(state.previous_pool) if state.pool.full else None
    state.previous_pool = sorted(state.pool)


def why_stop(state: TrainState, settings: TrainSettings) -> str | None:
    """Return why training ends after this epoch, or None if it goes on."""
    if settings.stopping and state.novelty is not None and state.novelty <= settings.alpha:
        return f"the pool is steady (π = {state.novelty:.3f} ≤ {settings.alpha})"
    return "max_epochs reached" if state.epoch >= settings.max_epochs else None
