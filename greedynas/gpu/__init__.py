"""The GPU engine: fused kernels for large images, CUDA graphs for small ones, behind the blocks' own interface."""
