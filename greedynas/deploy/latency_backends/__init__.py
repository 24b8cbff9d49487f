"""Latency backends time the blocks of a space in a runtime."""

from greedynas.runtime.registry import Registry

LATENCY_BACKENDS: Registry = Registry(
    "latency backend",
    {
        "onnxruntime": "greedynas.deploy.latency_backends.onnxruntime_backend:OnnxRuntimeBackend",
        "executorch": "greedynas.deploy.latency_backends.executorch_backend:ExecuTorchBackend",
        "litert": "greedynas.deploy.latency_backends.litert_backend:LiteRtBackend",
        "ncnn": "greedynas.deploy.latency_backends.ncnn_backend:NcnnBackend",
        "openvino": "greedynas.deploy.latency_backends.openvino_backend:OpenVinoBackend",
        "openvino-bf16": "greedynas.deploy.latency_backends.openvino_backend:OpenVinoBf16Backend",
        "torch": "greedynas.deploy.latency_backends.torch_backend:TorchBackend",
    },
)
