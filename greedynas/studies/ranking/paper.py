"""Numbers from the paper, for comparison with ours."""

# Table 3 of the paper: rank correlation of 1,000 paths, loss (accuracy) on 1,000 images against accuracy on 50,000.
PAPER: dict[str, dict[str, float]] = {
    "untrained": {"spearman": 0.155, "tau_a": 0.113},
    "uniform": {"spearman": 0.968, "tau_a": 0.851, "accuracy_spearman": 0.869, "accuracy_tau_a": 0.699},
    "greedy": {"spearman": 0.997, "tau_a": 0.961},
}
