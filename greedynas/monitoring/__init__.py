"""See runs from outside: their state, comparisons, removal, a live page, and what this machine has."""
