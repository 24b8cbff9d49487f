"""Export formats: files of a trained network for other tools, each with the runtime that runs it."""

from greedynas.runtime.registry import Registry

FORMATS: Registry = Registry(
    "format",
    {
        "onnx": "greedynas.deploy.formats.onnx_format:OnnxFormat",
        "safetensors": "greedynas.deploy.formats.safetensors_format:SafetensorsFormat",
    },
)
