"""Fault injection (`make chaos`): a run that a fault has ended must resume to the result of an undisturbed one."""
