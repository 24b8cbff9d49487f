"""Callbacks that send the numbers, images and the report of a run to Weights & Biases, MLflow or TensorBoard."""
