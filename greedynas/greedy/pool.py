"""The candidate pool: the best paths found so far, a fixed-size queue ordered by loss (section 4.1.1 of the paper)."""

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from greedynas.spaces.paths import OpPath

SHOWN = 10  # paths that are shown in a notebook


class CandidatePool:
    """The candidate pool of the paper: at most `size` paths, each with its latest loss.

    When the pool exceeds its size, the path with the worst loss is removed. Of equal losses, the one that was added or
    updated last is removed first. An update costs O(log size).

    Args:
        size: The largest number of paths in the pool.

    Example:
        >>> import greedynas
        >>> pool = greedynas.CandidatePool(size=2)
        >>> for path, loss in [((0, 1), 2.0), ((1, 1), 1.0), ((2, 0), 1.5)]:
        ...     pool.update(path, loss)
        >>> pool.best()
        [((1, 1), 1.0), ((2, 0), 1.5)]
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"the size of a pool must be at least one, got {size}")
        self.size = size
        self._entries: dict[OpPath, tuple[float, int]] = {}  # path -> (loss, age), in the order of entry
        self._paths: list[OpPath] = []  # for sampling in O(1); the last path takes the place of a removed one
        self._places: dict[OpPath, int] = {}
        self._heap: list[tuple[float, int, OpPath]] = []  # worst on top; entries that were updated later are stale
        self._updates = 0

    def update(self, path: OpPath, loss: float) -> None:
        """Add a path or update its loss, and remove the worst path if the pool exceeds its size."""
        if path not in self._entries:
            self._places[path] = len(self._paths)
            self._paths.append(path)
        self._updates += 1
        self._entries[path] = (loss, self._updates)
        heapq.heappush(self._heap, (-loss, -self._updates, path))
        if len(self._entries) > self.size:
            self._drop_worst()
        if len(self._heap) > 4 * self.size + 64:  # stale entries deep in the heap
            self._heap = [(-loss, -age, path) for path, (loss, age) in self._entries.items()]
            heapq.heapify(self._heap)

    def _drop_worst(self) -> None:
        while True:
            negative_loss, negative_age, path = heapq.heappop(self._heap)
            if self._entries.get(path) == (-negative_loss, -negative_age):
                break
        del self._entries[path]
        place, last = self._places.pop(path), self._paths.pop()
        if last != path:
            self._paths[place] = last
            self._places[last] = place

    def sample(self, rng: np.random.Generator) -> OpPath:
        """Return a random path of the pool, each equally likely."""
        return self._paths[int(rng.integers(len(self._paths)))]

    def best(self, n: int | None = None) -> list[tuple[OpPath, float]]:
        """Return the n best paths (all with None) and the loss of each, best first."""
        ranked = sorted(self._entries.items(), key=lambda entry: entry[1])
        return [(path, loss) for path, (loss, _) in ranked[:n]]

    def novelty(self, earlier: Iterable[OpPath]) -> float:
        """Return π, the share of the pool's paths that are not among earlier ones. A steady pool has a small π."""
        return 1 - len(self._entries.keys() & set(earlier)) / max(len(self._entries), 1)

    def losses(self) -> list[float]:
        """Return the loss of each path, in the order in which the paths came in."""
        return [loss for loss, _ in self._entries.values()]

    def __repr__(self) -> str:
        losses = sorted(self.losses())
        losses_range = f", losses {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
        return f"CandidatePool({len(self):,} of {self.size:,} paths{losses_range})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{' '.join(map(str, path))}</td><td>{loss:.4f}</td></tr>" for path, loss in self.best(SHOWN)
        )
        more = f", the best {SHOWN}" if len(self) > SHOWN else ""
        head = "<tr><th>path</th><th>loss</th></tr>"
        return f"<table><caption>{self!r}{more}</caption><thead>{head}</thead><tbody>{rows}</tbody></table>"

    @property
    def full(self) -> bool:
        """Whether the pool has as many paths as it can hold."""
        return len(self._entries) == self.size

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path: object) -> bool:
        return path in self._entries

    def __iter__(self) -> Iterator[OpPath]:
        return iter(self._paths)

    def state(self) -> dict[str, object]:
        """Return the whole state for a checkpoint, as JSON, including the orders of sampling and of equal losses."""
        entries = [[list(path), *self._entries[path]] for path in self._paths]
        return {"size": self.size, "updates": self._updates, "entries": entries}

    @classmethod
    def from_state(cls, state: dict) -> "CandidatePool":
        """Return the pool whose `state()` this is."""
        pool = cls(state["size"])
        pool._updates = state["updates"]
        for path, loss, age in state["entries"]:
            path = tuple(path)
            pool._places[path] = len(pool._paths)
            pool._paths.append(path)
            pool._entries[path] = (loss, age)
        pool._heap = [(-loss, -age, path) for path, (loss, age) in pool._entries.items()]
        heapq.heapify(pool._heap)
        return pool
