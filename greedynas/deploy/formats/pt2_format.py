"""The format pt2: an exported program of PyTorch (`torch.export`), run in PyTorch."""

import io
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from greedynas.deploy.formats.format import Classifier, Conversion, Format
from greedynas.deploy.formats.shared import example, quiet_logs, silenced
from greedynas.deploy.timing import Runner
from greedynas.runtime.files import write_atomically


def export_program(network: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """Return a network as a program for any number of images, without the names of files and folders of this machine."""
    program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


class Pt2Format(Format):
    """Programs of `torch.export` for any number of images. Opening one can execute code that it contains."""

    name = "pt2"
    suffix = ".pt2"
    runtime_name = "torch.export"
    executes_code = True

    def convert(self, source: Conversion, precision: str, file: Path) -> None:
        buffer = io.BytesIO()
        with silenced():
            torch.export.save(export_program(source.network, example(source, 2)), buffer)
        write_atomically(file, buffer.getvalue())

    def open(self, file: Path, threads: int | None = None) -> Classifier:
        with quiet_logs():
            module = torch.export.load(file).module()

        @torch.inference_mode()
        def classify(images: Tensor) -> Tensor:
            return module(images)

        return classify

    def runner(self, file: Path, image: Tensor, threads: int) -> Runner:
        classify = self.open(file)

        def run() -> float:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                start = time.perf_counter_ns()
                classify(image)
                return (time.perf_counter_ns() - start) / 1e6
            finally:
                torch.set_num_threads(before)

        return run

    def runtime(self) -> str:
        return f"torch {torch.__version__}"
