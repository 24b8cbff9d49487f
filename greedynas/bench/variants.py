"""The ways to run a supernet that `greedynas bench` compares: those of other toolkits and that of greedynas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from greedynas.data.datasets import Data
from greedynas.data.loader import ImageSet
from greedynas.gpu import engine
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.greedy.steps import TrainingStep, supernet_optimizer
from greedynas.models.batchnorm import bn_mode
from greedynas.models.supernet import Supernet
from greedynas.runtime.devices import autocast, full_precision
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.rng import torch_stream
from greedynas.settings.schema import Config
from greedynas.spaces.paths import OpPath
from greedynas.stages.run import choose_precisions

Step = Callable[[Tensor, Tensor, Sequence[OpPath], float], Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to run a supernet."""

    name: str
    label: str
    precision: str | None  # fp32, fp16, bf16; None: the precision that a run would choose on this machine
    channels_last: bool = True
    ours: bool = False  # use the engine, and recorded graphs for small images
    compiled: bool = False  # one fixed path as a separate network, with torch.compile
    alone: bool = False  # evaluate every path by itself, with BatchNorm statistics recalibrated for it

    def precisions(self, config: Config, device: torch.device) -> tuple[str, str]:
        """Return the precisions of training and of evaluation."""
        return choose_precisions(config, device) if self.precision is None else (self.precision, self.precision)

    def measures(self, name: str, fixed: Sequence[str]) -> bool:
        """Return whether a measure tells something of this variant; those in `fixed` need only one path."""
        if self.alone:
            return name == "rank"  # the rest is that of fp32
        return name in fixed or not self.compiled


VARIANTS = (
    Variant("toolkits", "fp32, NCHW, one path at a time", "fp32", channels_last=False, alone=True),
    Variant("fp32", "fp32, NCHW", "fp32", channels_last=False),
    Variant("fp16", "fp16 autocast, NCHW", "fp16", channels_last=False),
    Variant("bf16", "bf16 autocast, NCHW", "bf16", channels_last=False),
    Variant("fp32-nhwc", "fp32, NHWC", "fp32"),
    Variant("bf16-nhwc", "bf16 autocast, NHWC", "bf16"),
    Variant("compiled", "bf16 NHWC, one path compiled", "bf16", compiled=True),
    Variant("greedynas", "greedynas", None, ours=True),
)
PLAIN, EAGER = "fp32", "bf16-nhwc"  # the baselines of the ratios


def choose_variants(names: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants with these names in the order of the table, or all if there are no names."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in names:
        if name not in known:
            raise unknown("variant", name, list(known))
    return tuple(variant for variant in VARIANTS if not names or variant.name in names)


def why_not(variant: Variant, device: torch.device) -> str | None:
    """Return why a variant is left out on this machine, or None if it is not."""
    if device.type == "cuda":
        return None
    if variant.compiled:
        return "compiling is left out on a CPU: it takes minutes, and needs a C++ compiler"
    if variant.precision == "fp16" and not _cpu_has_fp16():
        return "this CPU has no fp16 arithmetic"
    return None


def _cpu_has_fp16() -> bool:
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return check is not None and bool(check())


class Subject:
    """A supernet with fresh weights that is run as one variant. Use it within `running`."""

    def __init__(self, variant: Variant, config: Config, device: torch.device, fixed: OpPath):
        self.variant, self.config, self.device, self.fixed = variant, config, device, fixed
        # `running` enables fp16 for everything, because the training loop supports only bf16 and fp32.
        chosen = variant.precisions(config, device)
        self.precision, self.eval_precision = ("bf16" if name == "bf16" else "fp32" for name in chosen)
        layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        net = Supernet(config.space, generator=torch_stream(config.seed, "init")).train()
        self.net = net.to(device, memory_format=layout)  # type: ignore[call-overload]
        self.network: nn.Module = self.net
        if variant.compiled:
            self.network = _Fixed(net.subnet(fixed).to(device, memory_format=layout))  # type: ignore[call-overload]
        self.optimizer = supernet_optimizer(self.network, config.train)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set up the engine, and autocast to fp16, as the variant requires."""
        with ExitStack() as stack:
            stack.enter_context(engine.using(self.config.engine if self.variant.ours else "off"))
            if self.variant.precision == "fp16":
                stack.enter_context(torch.autocast(self.device.type, torch.float16, cache_enabled=False))
            yield

    def step(self) -> Step:
        """Return the training step. Gradients in fp16 are not scaled, which would take a little longer."""
        return TrainingStep(self.network, self.optimizer, self.config.train, None, self.precision)  # type: ignore[arg-type]

    def evaluate(self, paths: Sequence[OpPath], images: Tensor, labels: Tensor, bn_images: int) -> NDArray:
        """Return losses with the BatchNorm statistics of the evaluated images, which is the default mode."""
        if self.variant.compiled:
            with self.evaluating():
                return self.score(self.fixed, images, labels)[:1]
        how: dict[str, Any] = {"bn_images": bn_images, "precision": self.eval_precision}
        if not self.variant.alone:
            return evaluate_paths(self.net, paths, images, labels, **how).losses
        how |= {"bn": "recalibrate", "calibration": images[:bn_images]}
        each = [evaluate_paths(self.net, [path], images, labels, **how).losses for path in paths]
        return np.concatenate(each)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set up the modes that `evaluate_paths` uses, which on a whole supernet takes longer than a forward pass."""
        with torch.no_grad(), bn_mode(self.network, "batch"), autocast(self.device, self.eval_precision):
            yield

    def score(self, path: OpPath, images: Tensor, labels: Tensor) -> NDArray:
        """Return the loss and the accuracy of one path. Call it within `evaluating`."""
        logits = self.network(images, path)
        loss = F.cross_entropy(full_precision(logits), labels)
        return torch.stack((loss, (logits.argmax(1) == labels).float().mean())).double().cpu().numpy()

    def see(self, data: Data) -> Data:
        """Return data in the memory format of this variant, because channels_last batches spread their format."""
        if self.variant.channels_last:
            return data
        return replace(data, train=_Contiguous.of(data.train), val=_Contiguous.of(data.val))


class _Fixed(nn.Module):
    """A compiled network in place of a supernet of which only one path is run."""

    recordable = False

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self._compiled = torch.compile(network)

    def path_modules(self, _: OpPath) -> list[nn.Module]:
        return [self.network]

    def forward(self, x: Tensor, _: OpPath) -> Tensor:
        result: Tensor = self._compiled(x)
        return result


class _Contiguous(ImageSet):
    @classmethod
    def of(cls, images: ImageSet) -> "_Contiguous":
        return cls(images._shelf, images._rows)

    def train_batches(self, epoch: int, batch_size: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in super().train_batches(epoch, batch_size, start):
            yield images.contiguous(), labels

    def eval_batch(self, indices: Sequence[int] | NDArray | None = None) -> tuple[Tensor, Tensor]:
        images, labels = super().eval_batch(indices)
        return images.contiguous(), labels


def failure_text(error: Exception) -> str:
    """Return an error in one line, for the row of a variant that failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory: use a smaller --batch"
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, GreedyNASError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 160 else f"{text[:157]}…"
