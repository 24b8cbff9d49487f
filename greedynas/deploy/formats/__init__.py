"""Export formats: files of a trained network for other tools, each with its runtime."""

from greedynas.runtime.registry import Registry

FORMATS: Registry = Registry(
    "format",
    {
        "onnx": "greedynas.deploy.formats.onnx_format:OnnxFormat",
        "safetensors": "greedynas.deploy.formats.safetensors_format:SafetensorsFormat",
        "coreml": "greedynas.deploy.formats.coreml_format:CoreMlFormat",
        "executorch": "greedynas.deploy.formats.executorch_format:ExecuTorchFormat",
        "litert": "greedynas.deploy.formats.litert_format:LiteRtFormat",
        "ncnn": "greedynas.deploy.formats.ncnn_format:NcnnFormat",
        "openvino": "greedynas.deploy.formats.openvino_format:OpenVinoFormat",
        "pt2": "greedynas.deploy.formats.pt2_format:Pt2Format",
        "web": "greedynas.deploy.formats.web_format:WebFormat",
    },
)
