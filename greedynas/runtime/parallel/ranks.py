"""Ranks: the processes that torchrun starts, one per device, all of them running the same program.

    torchrun --nproc-per-node 8 -m greedynas train imagenet --data … --out …

Every rank draws the same paths from the same streams and works on its share of a batch, or of the paths to evaluate.
Only rank 0 writes, and it makes the decisions that depend on files or clocks for all ranks (`on_first`). Values are
sent as JSON, arrays in NumPy's own format: nothing that is received is executed. The first rank that fails ends all of
them with its message.

With one process, every function here returns its argument at once. Torch is imported only if there are several.
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
PATIENCE = timedelta(days=7)  # for which ranks wait for a value: rank 0 may have hours of work of its own
LOOK = 0.25  # seconds between two checks for a failure
GRACE = 3.0  # seconds that a rank has to end by itself after another one has failed
FAILURE, SEEN = "failure", "told"  # keys of the store: the first failure, and how many ranks have read it


@dataclass(frozen=True)
class Group:
    """The group of all ranks, from the view of one of them."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this machine
    local_size: int
    store: Any  # the key-value store of torch.distributed
    control: Any  # the process group for values and decisions, on the CPU


_group: Group | None = None
_processes = 1


def rank() -> int:
    """Return the number of this rank, 0 without others."""
    return 0 if _group is None else _group.rank


def size() -> int:
    """Return the number of ranks, 1 without others and inside `alone`."""
    return 1 if _group is None else _group.size


def processes() -> int:
    """Return the number of ranks, also inside `alone`."""
    return _processes


def local_rank() -> int:
    """Return the number of this rank among those of its machine."""
    return 0 if _group is None else _group.local_rank


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return 1 if _group is None else _group.local_size


def is_first() -> bool:
    """Return whether this process is the one that writes and prints: rank 0, or the only process."""
    return rank() == 0


# Decisions and results


def broadcast(value: T) -> T:
    """Return rank 0's value on all ranks; it must be representable in JSON (a tuple arrives as a list)."""
    if _group is None:
        return value
    return json.loads(_broadcast_bytes(json.dumps(value).encode() if is_first() else b""))  # type: ignore[no-any-return]


def on_first(work: Callable[[], T]) -> T:
    """Run a function on rank 0 only, without the others, and return its result on all ranks."""
    if _group is None:
        return work()
    value: Any = None
    if is_first():
        with alone():
            value = work()
    return broadcast(value)


def gather(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the arrays of all ranks, on all ranks."""
    if _group is None:
        return [array]
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return [np.load(io.BytesIO(data), allow_pickle=False) for data in _gather_bytes(file.getvalue())]


def gather_values(value: T) -> list[T]:
    """Return the values of all ranks, on all ranks; they must be representable in JSON."""
    if _group is None:
        return [value]
    return [json.loads(data) for data in _gather_bytes(json.dumps(value).encode())]


def largest(number: int) -> int:
    """Return the largest number of all ranks."""
    if _group is None:
        return number
    import torch
    import torch.distributed as dist

    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MAX, _group.control)
    return int(found)


def barrier() -> None:
    """Wait until all ranks have come here."""
    if _group is not None:
        import torch.distributed as dist

        dist.barrier(_group.control)


def refuse_disagreement(what: str, value: Any) -> None:
    """Raise if the ranks do not all have the same value."""
    if len({json.dumps(seen) for seen in gather_values(value)}) > 1:
        raise GreedyNASError(f"the ranks of this run do not see the same {what}: give every machine the same files")


def refuse_difference(facts: dict[str, Any], advice: str) -> None:
    """Raise if a rank differs from rank 0 in one of these facts, and name the first difference."""
    first, *others = gather_values(facts)
    for number, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            if theirs.get(name) != first.get(name):
                raise GreedyNASError(
                    f"rank {number} has a different {name} from rank 0: {theirs.get(name)!s:.300} on rank {number}, "
                    f"{first.get(name)!s:.300} on rank 0; {advice}"
                )


def broadcast_tensors(tensors: "dict[str, Tensor] | None") -> "dict[str, Tensor]":
    """Return rank 0's tensors by name, on the CPU of every rank."""
    if _group is None:
        return tensors or {}
    import torch
    import torch.distributed as dist

    mine = {name: tensor.detach().cpu().contiguous() for name, tensor in (tensors or {}).items()}
    kinds = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in mine.items()]
    received = {}
    for name, dtype, shape in broadcast(kinds):
        tensor = mine[name] if is_first() else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, _group.control)
        received[name] = tensor
    return received


# Shares


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this rank's share of the items: neighbours, because neighbouring paths have most in common."""
    return items[len(items) * rank() // size() : len(items) * (rank() + 1) // size()]


def share_of_batch(batch: NDArray[Any]) -> NDArray[Any]:
    """Return this rank's share of a global batch, which takes as many images from its end as from its beginning.

    Mixup pairs the first image with the last one, the second one with the last but one, and so on.
    """
    if _group is None:
        return batch
    pairs = len(batch) // 2
    low, high = pairs * rank() // size(), pairs * (rank() + 1) // size()
    odd = [2 * pairs] if len(batch) % 2 and rank() == size() - 1 else []
    return batch[[*range(low, high), *range(2 * pairs - high, 2 * pairs - low), *odd]]


def refuse_small_batch(images: int, setting: str) -> None:
    """Raise if a batch has fewer than two images for each rank, which BatchNorm needs."""
    if images // 2 < size():
        raise GreedyNASError(
            f"{setting} gives {images} images for {size()} ranks, but each needs at least two; "
            "raise it or start fewer ranks"
        )


# From start to end


@contextmanager
def ranks(started: dict[str, str] | None = None) -> Iterator[None]:
    """Join the other ranks inside this context, if torchrun started several. The first one that fails ends all.

    `started` describes how this rank was started; it must be the same for all ranks.
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
        watch.join()  # a thread that still runs while the interpreter exits would abort the process
        _group, _processes = None, 1
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Exit this process, which was one of several ranks, without the usual finalisation of the interpreter.

    A thread of PyTorch may still hold a tensor of the last collective; releasing it after finalisation would abort the
    process.
    """
    atexit._run_exitfuncs()
    with suppress(OSError):  # the reader may be gone
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
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
    except GreedyNASError:
        raise
    except (RuntimeError, ValueError) as error:
        raise GreedyNASError(f"the ranks cannot find each other: {str(error).partition(chr(10))[0]:.300}") from None
    return Group(place.rank, place.size, place.local_rank, place.local_size, store, control)


@contextmanager
def alone() -> Iterator[None]:
    """Hide the other ranks inside this context, as if this process were the only one."""
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
    """Return the error that this rank ends with: its own if it failed first, else that of the rank that did."""
    own = " ".join(str(error).split()) if isinstance(error, GreedyNASError) else f"{type(error).__name__}: {error}"
    lost = _is_lost_connection(error)
    try:
        if lost:
            _wait(lambda: group.store.check([FAILURE]), GRACE)  # the lost rank may have left a message
            own = (
                "a rank was lost; give the same command again to resume from the last checkpoint "
                "(torchrun --max-restarts does so)"
            )
        first = json.loads(group.store.compare_set(FAILURE, "", json.dumps([group.rank, own])))
        if first[0] == group.rank:
            # torchrun ends the others as soon as this rank is gone, so they read the message first.
            _wait(lambda: group.store.add(SEEN, 0) >= group.size - 1, 2 * GRACE)
            return GreedyNASError(own) if lost else error
        group.store.add(SEEN, 1)
    except RuntimeError:  # the store was lost with its machine
        return GreedyNASError(own) if lost else error
    if first[1] != own:
        return RankFailed(f"rank {first[0]} failed: {first[1]}")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun shows all ranks in one place, where one message is enough
        return SystemExit(2)
    return GreedyNASError(own) if lost else error


def _watch(group: Group, ended: threading.Event) -> None:
    """Watch for failures of other ranks, in a thread: a rank that waits for a failed one would not notice."""
    from greedynas.runtime.terminal import complain

    while not ended.wait(LOOK):
        try:
            if not group.store.check([FAILURE]):
                continue
            first, message = json.loads(group.store.get(FAILURE))
            if ended.wait(GRACE):
                return
            complain(f"error: rank {first} failed: {message}")
            group.store.add(SEEN, 1)
            time.sleep(2 * LOOK)  # without torchrun the store ends with rank 0, and the failed rank still reads it
        except RuntimeError:
            return  # the store is gone, and so are the connections: the main thread will notice that
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
    dist.broadcast(length, 0, _group.control)
    content = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(content, 0, _group.control)
    return content.numpy().tobytes()


def _gather_bytes(data: bytes) -> list[bytes]:
    import torch
    import torch.distributed as dist

    assert _group is not None
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(_group.size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), _group.control)
    longest = max(int(length) for length in lengths)  # all ranks must send the same number of bytes
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(_group.size)]
    dist.all_gather(parts, mine, _group.control)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
