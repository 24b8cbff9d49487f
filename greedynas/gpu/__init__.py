"""The GPU engine: fused kernels for large images and CUDA graphs for small ones, behind the interface of the blocks."""
