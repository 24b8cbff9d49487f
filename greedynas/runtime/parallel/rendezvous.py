"""Rendezvous: ranks find each other, or end with a message that says what is missing.

torchrun gives every rank its number and runs the store through which they meet. Ranks that are started by hand meet at
MASTER_ADDR:MASTER_PORT, where rank 0 runs the store. The port may be taken, or a number given twice or not at all;
PyTorch's own client would wait for a foreign program forever. Every wait here has a time limit and an error message.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from greedynas.runtime.errors import GreedyNASError

T = TypeVar("T")
MEETING = 600.0  # seconds that ranks have to find each other; the variable below changes it
VARIABLE = "GREEDYNAS_MEETING_SECONDS"
ANSWER = 15.0  # seconds in which a store must answer an open connection
FAREWELL = 3.0  # seconds that all ranks have to read why they are refused, before the store ends with rank 0
ARRIVALS, VERDICT, READ = "greedynas/arrivals", "greedynas/verdict", "greedynas/read"  # keys of the store
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
TORCHRUN = (*NUMBERS, "MASTER_ADDR")


@dataclass(frozen=True)
class Place:
    """The place of this rank, from the environment variables."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this machine
    local_size: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def find_place() -> Place | None:
    """Return this rank's place, or None if the process is alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        return None
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if missing:
        raise GreedyNASError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: start the ranks with torchrun, or set them too"
        )
    found = {name: _number(name) for name in NUMBERS}
    place = Place(
        found["RANK"],
        found["WORLD_SIZE"],
        found["LOCAL_RANK"],
        found["LOCAL_WORLD_SIZE"],
        os.environ["MASTER_ADDR"],
        found["MASTER_PORT"],
    )
    if not 0 < place.port < 2**16:
        raise GreedyNASError(f"MASTER_PORT is {place.port}, which is not a port: give one from 1 to 65535")
    return place


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise GreedyNASError(f"{name} is {os.environ[name]!r}, which is not a whole number; torchrun sets it") from None


def patience() -> float:
    """Return the seconds that ranks wait for each other at the start."""
    with suppress(ValueError):
        return float(os.environ.get(VARIABLE, MEETING))
    raise GreedyNASError(f"{VARIABLE} is {os.environ[VARIABLE]!r}, which is not a number of seconds")


def meet(place: Place) -> Any:
    """Return a store that exactly the ranks of this start share."""
    import torch.distributed as dist

    until = time.monotonic() + patience()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_torchrun(place, until)
    else:
        store = _own_store(place, until)
        arrive(store, place, until)
    return dist.PrefixStore(agreed_name(store, place.rank, place.size, until), store)  # type: ignore[attr-defined]


def _store_of_torchrun(place: Place, until: float) -> Any:
    from torch.distributed.rendezvous import rendezvous

    left = timedelta(seconds=max(1.0, until - time.monotonic()))
    return _within(lambda: next(iter(rendezvous("env://", timeout=left)))[0], until, _nobody(place))


def _own_store(place: Place, until: float) -> Any:
    import torch.distributed as dist

    def connect() -> Any:
        first, left = place.rank == 0, timedelta(seconds=max(1.0, until - time.monotonic()))
        # Do not wait for the workers here: an error of that wait would not name the missing ones.
        store: Any = dist.TCPStore  # type: ignore[attr-defined]
        return store(place.host, place.port, place.size, first, left, False, multi_tenant=True)

    if place.rank == 0:
        try:
            return _within(connect, until, _nobody(place))
        except RuntimeError as error:
            raise GreedyNASError(
                f"rank 0 cannot use {place.address}: {_first_line(error)}; if another program or another rank 0 has that port, "
                "give all ranks another MASTER_PORT"
            ) from None
    _wait_for_listener(place, until)
    taken = f"the program that listens at {place.address} is not rank 0 of this run; give all ranks another MASTER_PORT"
    try:
        return _within(connect, time.monotonic() + min(ANSWER, patience()), taken)
    except RuntimeError:
        raise GreedyNASError(taken) from None


def _wait_for_listener(place: Place, until: float) -> None:
    problem: OSError | None = None
    while time.monotonic() < until:
        try:
            socket.create_connection((place.host, place.port), timeout=5).close()
            return
        except OSError as error:
            problem = error
            time.sleep(0.1)
    raise GreedyNASError(f"{_nobody(place)} ({problem})")


def _nobody(place: Place) -> str:
    return (
        f"rank {place.rank} of {place.size} has waited {patience():.0f} s for rank 0 at {place.address}; is it started?"
    )


def _within(work: Callable[[], T], until: float, problem: str) -> T:
    """Run work that may never return in a thread, and raise `problem` if it is not done by `until`."""
    results: list[T] = []
    failures: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if failures:
        raise failures[0]
    if not results:
        raise GreedyNASError(problem)
    return results[0]


def _first_line(error: BaseException) -> str:
    return f"{str(error).strip().partition(chr(10))[0]:.200}".rstrip(". ")


# Ranks that were started by hand


def arrive(store: Any, place: Place, until: float) -> None:
    """Wait until there is one process of each rank. Rank 0 checks who has arrived and sends the problem to all."""
    number = store.add(ARRIVALS, 1)
    store.set(f"{ARRIVALS}/{number}", json.dumps([place.rank, place.size]))
    while time.monotonic() < until + (FAREWELL if place.rank else 0):  # rank 0 decides, so the others wait longer
        if place.rank == 0:
            _judge(store, place, over=False)
        if store.check([VERDICT]):
            break
        time.sleep(0.05)
    else:
        if place.rank != 0:
            raise GreedyNASError(_nobody(place))
        _judge(store, place, over=True)
    problem, accepted = json.loads(store.get(VERDICT))
    if problem is None and number not in accepted:
        raise GreedyNASError(f"RANK {place.rank} was given to two processes; this is the second one")
    if problem is not None:
        _part(store, place, accepted)
        raise GreedyNASError(problem)


def _judge(store: Any, place: Place, over: bool) -> None:
    """Store the verdict if there can be one: the problem or None, and the numbers of the arrived processes."""
    count = store.add(ARRIVALS, 0)
    numbers = [number for number in range(1, count + 1) if store.check([f"{ARRIVALS}/{number}"])]
    arrived = [json.loads(store.get(f"{ARRIVALS}/{number}")) for number in numbers]
    ranks = [rank for rank, _ in arrived]
    problem = None
    for rank, size in arrived:
        if size != place.size:
            problem = f"rank {rank} has WORLD_SIZE {size}, rank 0 has {place.size}: give all ranks the same WORLD_SIZE"
        elif not 0 <= rank < place.size:
            problem = (
                f"a process has RANK {rank}, but with WORLD_SIZE {place.size} there are ranks 0 to {place.size - 1}"
            )
        elif ranks.count(rank) > 1:
            problem = f"RANK {rank} was given to {ranks.count(rank)} processes: give each rank once"
    missing = [rank for rank in range(place.size) if rank not in ranks]
    if problem is None and missing and over:
        named = ", ".join(map(str, missing[:10]))
        absent = f"rank {named} of {place.size} did not arrive within {patience():.0f} s"
        problem = f"{absent}; is every rank started, with its own RANK?"
    if problem is not None or not missing:
        store.set(VERDICT, json.dumps([problem, numbers]))


def _part(store: Any, place: Place, accepted: list[int]) -> None:
    """Let all others read the verdict before rank 0 ends, and the store with it."""
    if place.rank != 0:
        store.add(READ, 1)
        return
    until = time.monotonic() + FAREWELL
    while store.add(READ, 0) < len(accepted) - 1 and time.monotonic() < until:
        time.sleep(0.05)


# All ranks


def agreed_name(store: Any, rank: int, size: int, until: float) -> str:
    """Return a name that only this group of ranks has.

    torchrun's store outlives a group, and its count of restarts differs between machines; entries that an earlier group
    left in the store, such as addresses, must not be read again. Rank 0 draws the name. The others recognise it as new
    because it comes with the random words that they have just sent.
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"greedynas/hello/{rank}", mine)
    while time.monotonic() < until:
        if rank == 0:
            heard = [f"greedynas/hello/{other}" for other in range(1, size)]
            words = [store.get(key).decode() if store.check([key]) else "" for key in heard]
            store.set("greedynas/welcome", json.dumps([mine, *words]))
            if all(store.check([f"{mine}/{other}"]) for other in range(1, size)):
                return mine
        elif store.check(["greedynas/welcome"]):
            name, *words = json.loads(store.get("greedynas/welcome"))
            if mine in words:
                store.set(f"{name}/{rank}", "")
                return str(name)
        time.sleep(0.05)
    raise GreedyNASError(
        f"rank {rank} of {size} has waited {patience():.0f} s for the others; are all of them started?"
    )
