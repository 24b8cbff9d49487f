"""Test helpers shared by `tests.greedy.test_pool` and others."""


class Reference:
    """A literal implementation of the pool: a path enters with its newest loss, and the worst of too many is
    removed."""

    def __init__(self, size):
        self.size, self.entries = size, []

    def update(self, path, loss):
        self.entries = [entry for entry in self.entries if entry[0] != path] + [(path, loss)]
        if len(self.entries) > self.size:
            # Of equal losses, the newest one is removed.
            worst = max(range(len(self.entries)), key=lambda i: (self.entries[i][1], i))
            del self.entries[worst]
