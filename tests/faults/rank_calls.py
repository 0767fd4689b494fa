"""What ranks of many fault tests do: calls whose results are checked."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault_rank import Fault, Rank, catch
from machine import enter_network

__all__ = ["all_reduce", "enter_host", "finish", "repeated", "transport", "works"]


def all_reduce(rank: Rank, count: int = 7, group: Any = None) -> None:
    """One all-reduce, whose result is checked."""
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group)
    assert torch.all(tensor == rank.size), "a wrong result was returned as success"


def repeated(call: Callable[..., None], *arguments: Any) -> Fault | None:
    """Repeat a call until it fails; return the error."""

    def forever() -> None:
        while True:
            call(*arguments)

    return catch(forever)


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


def finish(rank: Rank, **checks: bool) -> dict[str, Any]:
    """Leave a group in which everything must have worked; return what ``Job.all_hold`` looks at."""
    dist.destroy_process_group()
    return {"left": rank.left(), **checks}


def transport() -> str:
    """Return what moves the bytes of the default group: "shm" or "gloo"; "" of another backend."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.transport() if hasattr(backend, "transport") else ""


def enter_host(rank: Rank, names: list[str], ends: list[str]) -> None:
    """Move this process to its host; the connection to the store stays where it was made."""
    enter_network(names[rank.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = ends[rank.rank]
