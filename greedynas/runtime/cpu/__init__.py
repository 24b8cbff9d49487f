"""Training and evaluation on a CPU as quick as plain PyTorch allows: memory, gradients of depthwise convolutions, threads."""
