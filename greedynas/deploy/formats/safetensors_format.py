"""The format safetensors, with the card in the metadata and beside the file as JSON, run in PyTorch."""

from pathlib import Path

import torch
from torch import Tensor, nn

from greedynas.deploy.formats.format import Classifier, Conversion, Format
from greedynas.models.footprint import refuse_oversized
from greedynas.models.model_file import Card, load_network, save_network


class SafetensorsFormat(Format):
    """The weights of the trained network. They run in PyTorch, where latency depends on how it is used."""

    name = "safetensors"
    suffix = ".safetensors"
    runtime_name = "PyTorch"
    published = True
    card = "both"
    is_pytorch = True

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        save_network(file, source.network, source.card)

    def open(self, file: Path, threads: int | None = None) -> Classifier:
        return _classifier(load_network(file)[0])

    def runner(self, file: Path, image: Tensor, threads: int) -> None:
        return None

    def load(self, file: Path, threads: int | None = None) -> tuple[Classifier, Card]:
        network, card = load_network(file)
        refuse_oversized(network, card)
        return _classifier(network), card

    def runtime(self) -> str:
        return f"torch {torch.__version__}"


def _classifier(network: nn.Module) -> Classifier:
    @torch.inference_mode()
    def classify(inputs: Tensor) -> Tensor:
        return network(inputs)

    return classify
