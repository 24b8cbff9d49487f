"""Latency backends: what the blocks of a space are timed in. ONNX Runtime, PyTorch, and those of plugins."""

from greedynas.runtime.registry import Registry

LATENCY_BACKENDS: Registry = Registry(
    "latency backend",
    {
        "onnxruntime": "greedynas.deploy.latency_backends.onnxruntime_backend:OnnxRuntimeBackend",
        "torch": "greedynas.deploy.latency_backends.torch_backend:TorchBackend",
    },
)
