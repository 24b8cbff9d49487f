"""Faults on purpose: every run that a fault ends goes on to the result it would have had without it. `make chaos`."""
