"""Recording of CUDA graphs, for small images, where launching a kernel from Python takes longer than running it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from greedynas.gpu import engine

SMALL = 64  # pixels; larger images keep the GPU busy without graphs
WARM_UPS = 2  # before recording: libraries choose algorithms and allocate workspaces on their first calls

Graph = torch.cuda.CUDAGraph


def worth_recording(images: Tensor) -> bool:
    small = images.device.type == "cuda" and images.shape[-1] <= SMALL
    return small and engine.mode() != "off" and engine.has_triton()


def recorded(work: Callable[[], None], pool: Any = None) -> Graph:
    warm_up(work)
    return captured(work, pool)


def captured(work: Callable[[], None], pool: Any) -> Graph:
    graph = Graph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def in_turn(works: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


def side_by_side(works: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that runs each work on its own stream; libraries have one workspace per stream."""
    sides = [torch.cuda.Stream() for _ in works]

    def all_of_them() -> None:
        main = torch.cuda.current_stream()
        for work, side in zip(works, sides, strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                work()
        for side in sides:
            main.wait_stream(side)

    return all_of_them


def new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


@cache
def _side_stream() -> Any:
    return torch.cuda.Stream()


def warm_up(work: Callable[[], Any]) -> None:
    """Run the work a few times, always on the same side stream: the allocator reuses memory only within a stream."""
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)


class Casts:
    """bf16 copies of the weights of all 1x1 convolutions, which recorded blocks read instead of casting them again."""

    def __init__(self, net: nn.Module):
        convs = [
            m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) and m.stride == (1, 1)
        ]
        self.convs = [conv for conv in convs if conv.bias is None and conv.weight.is_contiguous()]
        self.of: dict[Tensor, Tensor] = {
            conv.weight: conv.weight.detach().flatten(1).to(torch.bfloat16) for conv in self.convs
        }

    def refresh(self) -> None:
        for weight, cast in self.of.items():
            cast.copy_(weight.detach().flatten(1))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let `engine` use the copies inside this context."""
        for conv in self.convs:
            conv.__dict__["cast"] = self.of[conv.weight]
        try:
            yield
        finally:
            for conv in self.convs:
                del conv.__dict__["cast"]


def writing(block: nn.Module, **places: Tensor) -> Any:
    """Return a context in which the block writes its results directly to these tensors, if it can."""
    if not getattr(block, "writes_to_places", False):
        return nullcontext()
    return engine.writing(**{name: place.permute(0, 2, 3, 1) for name, place in places.items()})


def bring(result: Tensor, place: Tensor) -> None:
    if result.data_ptr() != place.data_ptr():
        place.copy_(result)
