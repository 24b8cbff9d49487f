"""NCNN files on the CPU, computed in fp32."""

from pathlib import Path

import numpy as np

from greedynas.deploy.runtimes.model import Floats, OneByOne, Shapes
from greedynas.runtime.errors import GreedyNASError

INPUT, OUTPUT = "in0", "out0"  # the names that pnnx gives


def weights_of(file: Path) -> Path:
    """Return the file with the weights that belongs to a `.param` file."""
    return file.with_suffix(".bin")


class Model(OneByOne):
    """An NCNN file (`.param` with its `.bin`)."""

    def open(self, threads: int) -> Shapes:
        import ncnn

        self._ncnn, net = ncnn, ncnn.Net()
        net.opt.use_vulkan_compute = False
        for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
            setattr(net.opt, option, False)
        if threads:
            net.opt.num_threads = threads
        if net.load_param(str(self.file)) or net.load_model(str(weights_of(self.file))):
            raise GreedyNASError(f"{self.name} is not an NCNN file, or its weights do not belong to it")
        if list(net.input_names()) != [INPUT] or list(net.output_names()) != [OUTPUT]:
            raise GreedyNASError(f"{self.name} does not fit its card: it should take {INPUT} and give {OUTPUT}")
        self._net = net
        return {}

    def run_one(self, image: Floats) -> Floats:
        extractor = self._net.create_extractor()
        extractor.input(INPUT, self._ncnn.Mat(np.ascontiguousarray(image[0])))
        failed, logits = extractor.extract(OUTPUT)
        if failed:
            raise RuntimeError(f"a layer of it fails (code {failed})")
        return np.array(logits, np.float32)
