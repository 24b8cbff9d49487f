"""Many ranks: what torchrun starts, one process a device, all of them running the same program.

    torchrun --nproc-per-node 8 -m greedynas train imagenet --data … --out …

Every rank draws the same paths from the same streams and works on its share of a batch, or of the paths to evaluate. Rank 0
alone writes, and what depends on files or clocks it decides for all (`on_first`). Decisions travel as JSON, arrays as NumPy's
own format: nothing that is received is executed. Whichever rank fails first ends all of them, with its message.

With one process every function here returns at once what it was given. Torch is imported only where there are several.
"""

import atexit
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel.rendezvous import Place, find_place, meet

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # with which ranks wait for a decision: rank 0 may have hours of work of its own
LOOK = 0.25  # seconds between two looks for a failure
GRACE = 3.0  # seconds in which a rank may end by itself after another one has failed
FAILURE, TOLD = "failure", "told"  # keys of the store


@dataclass(frozen=True)
class Group:
    """All ranks, as one of them sees them."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    store: Any  # torchrun's
    words: Any  # the process group of decisions, on the CPU


_group: Group | None = None
_processes = 1


def rank() -> int:
    return 0 if _group is None else _group.rank


def size() -> int:
    return 1 if _group is None else _group.size


def processes() -> int:
    """How many ranks there are, for one that is `alone` as well."""
    return _processes


def local_rank() -> int:
    return 0 if _group is None else _group.local_rank


def local_size() -> int:
    return 1 if _group is None else _group.local_size


def is_first() -> bool:
    """Whether this process writes and speaks: it is rank 0, or alone."""
    return rank() == 0


# Decisions and results


def broadcast(value: T) -> T:
    """What rank 0 says, on all ranks: anything that JSON has (a tuple arrives as a list)."""
    if _group is None:
        return value
    return json.loads(_broadcast_bytes(json.dumps(value).encode() if is_first() else b""))  # type: ignore[no-any-return]


def on_first(work: Callable[[], T]) -> T:
    """Rank 0 alone does this, as if there were no others; all get what it returns."""
    if _group is None:
        return work()
    value: Any = None
    if is_first():
        with alone():
            value = work()
    return broadcast(value)


def gather(array: NDArray[Any]) -> list[NDArray[Any]]:
    """The arrays of all ranks, on all ranks."""
    if _group is None:
        return [array]
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return [np.load(io.BytesIO(data), allow_pickle=False) for data in _gather_bytes(file.getvalue())]


def gather_words(value: T) -> list[T]:
    """The same for anything that JSON has."""
    if _group is None:
        return [value]
    return [json.loads(data) for data in _gather_bytes(json.dumps(value).encode())]


def largest(number: int) -> int:
    """The largest of all ranks."""
    if _group is None:
        return number
    import torch
    import torch.distributed as dist

    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MAX, _group.words)
    return int(found)


def barrier() -> None:
    """Wait for all ranks."""
    if _group is not None:
        import torch.distributed as dist

        dist.barrier(_group.words)


def refuse_disagreement(what: str, value: Any) -> None:
    """All ranks must see the same."""
    if len({json.dumps(seen) for seen in gather_words(value)}) > 1:
        raise GreedyNASError(f"the ranks of this run do not see the same {what}: give every machine the same files")


def refuse_difference(facts: dict[str, Any], advice: str) -> None:
    """Refuse ranks that differ from rank 0 in one of these facts, and name the first that does."""
    first, *others = gather_words(facts)
    for number, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            if theirs.get(name) != first.get(name):
                raise GreedyNASError(
                    f"rank {number} has another {name} than rank 0: {theirs.get(name)!s:.300} there, "
                    f"{first.get(name)!s:.300} here; {advice}"
                )


def broadcast_tensors(tensors: "dict[str, Tensor] | None") -> "dict[str, Tensor]":
    """Rank 0's tensors by name, on the CPU of every rank."""
    if _group is None:
        return tensors or {}
    import torch
    import torch.distributed as dist

    mine = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
    kinds = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in mine.items()]
    received = {}
    for name, dtype, shape in broadcast(kinds):
        tensor = mine[name] if is_first() else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, _group.words)
        received[name] = tensor
    return received


# Shares


def share(items: Sequence[T]) -> Sequence[T]:
    """This rank's part of them: neighbours, which have most in common."""
    return items[len(items) * rank() // size() : len(items) * (rank() + 1) // size()]


def share_of_batch(batch: NDArray[Any]) -> NDArray[Any]:
    """This rank's part of a global batch: as many from its end as from its beginning, because mixup pairs the first image
    with the last one, the second with the last but one, and so on."""
    if _group is None:
        return batch
    pairs = len(batch) // 2
    low, high = pairs * rank() // size(), pairs * (rank() + 1) // size()
    odd = [2 * pairs] if len(batch) % 2 and rank() == size() - 1 else []
    return batch[[*range(low, high), *range(2 * pairs - high, 2 * pairs - low), *odd]]


def refuse_small_batch(images: int, setting: str) -> None:
    """BatchNorm needs two images on every rank."""
    if images // 2 < size():
        raise GreedyNASError(
            f"{setting} gives {images} images for {size()} ranks: at least two each are needed; raise it or start fewer ranks"
        )


# From start to end


@contextmanager
def ranks(started: dict[str, str] | None = None) -> Iterator[None]:
    """Inside, this process is one of those that torchrun started, if it did. Whichever fails first ends all of them.

    `started` says how this rank was started; it must be the same for all.
    """
    place = find_place()
    if place is None:
        yield
        return
    import torch.distributed as dist

    global _group, _processes
    _group = group = _join(place)
    _processes = group.size
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(group, ended), daemon=True)
    watch.start()
    try:
        refuse_difference(started or {}, "start all ranks with the same command")
        yield
        barrier()  # nobody leaves while another one may still fail
    except Exception as error:
        ended.set()
        cause = _first_cause(group, error)
        if cause is error:
            raise
        raise cause from None
    finally:
        ended.set()
        watch.join()  # a thread that still looks while the interpreter ends would abort it
        _group, _processes = None, 1
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process, which was one of several ranks, without taking Python apart first. A thread of PyTorch's may still hold
    a tensor of the last collective; where it lets go of it after Python's end, it aborts the process."""
    atexit._run_exitfuncs()
    with suppress(OSError):  # whoever reads this may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _join(place: Place) -> Group:
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(place.local_rank % gpus)
    try:
        store = meet(place)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
        words = dist.new_group(backend="gloo", timeout=PATIENCE)
    except GreedyNASError:
        raise
    except (RuntimeError, ValueError) as error:
        raise GreedyNASError(f"the ranks cannot find each other: {str(error).partition(chr(10))[0]:.300}") from None
    return Group(place.rank, place.size, place.local_rank, place.local_size, store, words)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, there are no other ranks."""
    global _group
    before, _group = _group, None
    try:
        yield
    finally:
        _group = before


# Failures


class RankFailed(GreedyNASError):
    """Another rank failed first."""


def _first_cause(group: Group, error: Exception) -> BaseException:
    """What this rank ends with: its own failure if it is the first one, else the one that was."""
    own = " ".join(str(error).split()) if isinstance(error, GreedyNASError) else f"{type(error).__name__}: {error}"
    lost = _is_lost_connection(error)
    try:
        if lost:
            _wait(lambda: group.store.check([FAILURE]), GRACE)  # whoever is gone may have left word
            own = "a rank was lost; the same command goes on from the last checkpoint (torchrun --max-restarts does so)"
        first = json.loads(group.store.compare_set(FAILURE, "", json.dumps([group.rank, own])))
        if first[0] == group.rank:
            # torchrun ends the others as soon as this rank is gone: first they shall have read why.
            _wait(lambda: group.store.add(TOLD, 0) >= group.size - 1, 2 * GRACE)
            return GreedyNASError(own) if lost else error
        group.store.add(TOLD, 1)
    except RuntimeError:  # the store was lost with its machine
        return GreedyNASError(own) if lost else error
    # If all have met the same, one line is enough.
    return SystemExit(2) if first[1] == own else RankFailed(f"rank {first[0]} failed: {first[1]}")


def _watch(group: Group, ended: threading.Event) -> None:
    """In a thread of its own: a rank that waits for another one would not notice that this has failed."""
    from greedynas.runtime.terminal import complain

    while not ended.wait(LOOK):
        try:
            if not group.store.check([FAILURE]):
                continue
            first, told = json.loads(group.store.get(FAILURE))
            if ended.wait(GRACE):
                return
            complain(f"error: rank {first} failed: {told}")
            group.store.add(TOLD, 1)
            time.sleep(2 * LOOK)  # without torchrun the store ends with rank 0, and who has failed still looks into it
        except RuntimeError:
            return  # the store is gone: so will be the connections, which tell the main thread
        os._exit(2)


def _is_lost_connection(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, GreedyNASError):
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "onnection closed", "onnection reset", "NCCL")
    )


def _wait(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.05)


# Bytes


def _broadcast_bytes(data: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    assert _group is not None
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, _group.words)
    content = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(content, 0, _group.words)
    return content.numpy().tobytes()


def _gather_bytes(data: bytes) -> list[bytes]:
    import torch
    import torch.distributed as dist

    assert _group is not None
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(_group.size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), _group.words)
    longest = max(int(length) for length in lengths)  # all must send as much
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(_group.size)]
    dist.all_gather(parts, mine, _group.words)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
