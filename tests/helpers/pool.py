"""Helpers of tests: shared by `tests.greedy.test_pool` and others."""


class Reference:
    """The design's words, literally: enter with the newest loss; if there are too many, the worst leaves, for good."""

    def __init__(self, size):
        self.size, self.entries = size, []

    def update(self, path, loss):
        self.entries = [entry for entry in self.entries if entry[0] != path] + [(path, loss)]
        if len(self.entries) > self.size:
            # Of equal losses the newest leaves.
            worst = max(range(len(self.entries)), key=lambda i: (self.entries[i][1], i))
            del self.entries[worst]
