"""Test helpers shared by `tests.jobs.test_estimates` and others."""

from greedynas.jobs.machine_speed import Pace

PACE = Pace(
    step=0.1,
    waiting=0.01,
    filtering=0.2,
    evaluation=0.05,
    retrain_step=0.1,
    adapt_step=0.0,
    classification=0.01,
    measuring=2.0,
)
