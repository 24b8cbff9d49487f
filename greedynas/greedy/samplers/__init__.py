"""Samplers decide which paths the next updates of a supernet train: the paper's greedy one and its baselines."""
