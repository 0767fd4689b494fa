"""What ranks do in the rows of the fault matrix, with any backend."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from fault_rank import Fault, Rank, catch
from in_call import soon, tell_in_call
from matrix_machine import enter_network

__all__ = [
    "VICTIM",
    "aftermath",
    "all_reduce",
    "all_reduce_large",
    "arrives",
    "enter_host",
    "finish",
    "others",
    "repeated",
    "same_store",
    "until_error",
    "works",
]

VICTIM = 1
LARGE = 8 << 20  # elements


def others(rank: Rank, away: tuple[int, ...] = (VICTIM,)) -> list[int]:
    """Return the other ranks that are still there."""
    return [r for r in range(rank.size) if r not in (rank.rank, *away)]


def aftermath(rank: Rank, away: tuple[int, ...] = (VICTIM,)) -> dict[str, Any]:
    """Leave the failed group, look what is left, and make a new one of those who remain."""
    return rank.recover(others(rank, away))


def all_reduce(rank: Rank, count: int = 7, group: Any = None) -> None:
    """One all-reduce, whose result is checked."""
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group)
    assert torch.all(tensor == rank.size), "a wrong result was returned as success"


def all_reduce_large(rank: Rank) -> None:
    """One all-reduce of 32 MiB."""
    all_reduce(rank, LARGE)


def repeated(call: Callable[..., None], *arguments: Any) -> Fault | None:
    """Repeat a call until it fails; return the error."""

    def forever() -> None:
        while True:
            call(*arguments)

    return catch(forever)


def finish(rank: Rank, **more: Any) -> dict[str, Any]:
    """End a scenario in which everything must have worked; see Stage.checks."""
    dist.destroy_process_group()
    return {"left": rank.left(), **more}


def enter_host(rank: Rank, names: list[str], ends: list[str]) -> None:
    """Move this process to its host; the connection to the store stays where it was made."""
    enter_network(names[rank.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = ends[rank.rank]


def until_error(
    rank: Rank,
    call: Callable[[Rank], None],
    ballast: int = 0,
    away: tuple[int, ...] = (VICTIM,),
) -> dict[str, Any]:
    """Repeat a call until it fails; tell the error, return the aftermath.

    Args:
        ballast: bytes that the victim holds besides.
    """
    rank.used()
    held = torch.ones(ballast // 4) if rank.rank == VICTIM else None
    tell_in_call(rank, 3)
    rank.tell(repeated(call, rank))
    del held
    return aftermath(rank, away)


def arrives(
    rank: Rank, call: Callable[[Rank], None], timeout: float | None = None
) -> dict[str, Any]:
    """Call, with a timeout when the test says so; the victim never does."""
    rank.used()
    if timeout is None and rank.rank != VICTIM:
        tell_in_call(rank)
    else:
        rank.tell("ready")
        rank.hear()
        soon(timeout or 30.0)
    if rank.rank == VICTIM:
        time.sleep(60.0)
    rank.tell(catch(call, rank))
    return aftermath(rank)


def works(rank: Rank, count: int = 300_000) -> None:
    """Check that the default group does what it should: collectives and messages of all sizes."""
    for elements in (3, count):
        tensor = torch.full((elements,), rank.rank + 1.0)
        dist.all_reduce(tensor)
        whole = rank.size * (rank.size + 1) / 2
        assert torch.all(tensor == whole), "a wrong result was returned as success"
        dist.all_reduce(tensor, async_op=True).wait()
        assert torch.all(tensor == whole * rank.size), "a wrong result was returned as success"
        if rank.size > 1:
            right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
            into = torch.empty(elements)
            work = dist.isend(torch.full((elements,), float(rank.rank)), right)
            dist.recv(into, left)
            if work is not None:
                work.wait()
            assert torch.all(into == left), "a wrong message was returned as success"


@contextlib.contextmanager
def same_store(rank: Rank, file: str = "port") -> Iterator[dist.Store]:
    """Give the ranks a store in rank 0's process."""
    path = rank.folder / file
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)
    rank.before.files["socket"] += 1
    yield store
