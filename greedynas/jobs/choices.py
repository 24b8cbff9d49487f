"""What `auto` chooses and why: values by setting, which the user's own values override."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Effort:
    """The length of a training: a number of images, within a range of epochs."""

    images: int
    fewest: int
    most: int

    def epochs(self, train_images: int) -> int:
        return min(max(math.ceil(self.images / train_images), self.fewest), self.most)


@dataclass
class Choices:
    """The chosen values by dotted key, with reasons. Values that were given by hand are kept."""

    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def choose(self, key: str, value: Any, why: str) -> Any:
        """Choose a value unless one was given, and return the one to use; without a reason, the choice is not shown."""
        if key in self.given:
            return self.given[key]
        self.values[key] = value
        if why:
            shown = f"{value:,}" if type(value) is int else str(value).lower()
            self.reasons.append(f"{key} {shown}: {why}")
        return value
