"""What ranks of many fault tests do: calls whose results are checked."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from backend import reduce_scatter_single, wait_all
from fault_rank import Fault, Rank, catch

import fastcoll

WRONG = "a wrong result was returned as success"


def all_reduce(rank: Rank, count: int = 7, group: Any = None) -> None:
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group)
    assert torch.all(tensor == rank.size), WRONG


def all_reduce_with_communicator(rank: Rank, count: int = 7) -> None:
    tensor = torch.ones(count)
    fastcoll.communicator().all_reduce(tensor)
    assert torch.all(tensor == rank.size), WRONG


def all_reduce_with_operator(rank: Rank, count: int = 7) -> None:
    result = torch.ops.fastcoll.all_reduce(torch.ones(count), "sum", dist.group.WORLD.group_name)
    assert torch.all(result == rank.size), WRONG


def all_reduce_with_plan(rank: Rank, count: int = 7) -> None:
    tensor = torch.ones(count)
    plan = fastcoll.communicator().all_reduce_plan(tensor)
    for _ in range(2):
        tensor.fill_(1.0)
        plan()
        assert torch.all(tensor == rank.size), WRONG


def all_reduce_async(rank: Rank, count: int) -> None:
    tensors = [torch.full((count,), 2.0) for _ in range(4)]
    wait_all([dist.all_reduce(tensor, async_op=True) for tensor in tensors])
    assert all(torch.all(tensor == 2.0 * rank.size) for tensor in tensors), WRONG


def broadcast(rank: Rank, count: int, root: int = 0, group: Any = None) -> None:
    tensor = torch.full((count,), float(rank.rank))
    dist.broadcast(tensor, root, group=group)
    assert torch.all(tensor == root), WRONG


def reduce(rank: Rank, count: int, root: int = 0) -> None:
    tensor = torch.ones(count)
    dist.reduce(tensor, root)
    assert rank.rank != root or torch.all(tensor == rank.size), WRONG


def gather(rank: Rank, count: int, root: int = 0) -> None:
    tensors = [torch.empty(count) for _ in range(rank.size)] if rank.rank == root else []
    dist.gather(torch.full((count,), float(rank.rank)), tensors or None, root)
    assert all(torch.all(tensor == r) for r, tensor in enumerate(tensors)), WRONG


def scatter(rank: Rank, count: int, root: int = 0) -> None:
    tensor, all_ranks = torch.empty(count), range(rank.size)
    tensors = [torch.full((count,), float(r)) for r in all_ranks] if rank.rank == root else None
    dist.scatter(tensor, tensors, root)
    assert torch.all(tensor == rank.rank), WRONG


def all_gather(rank: Rank, count: int) -> None:
    tensors = [torch.empty(count) for _ in range(rank.size)]
    dist.all_gather(tensors, torch.full((count,), float(rank.rank)))
    assert all(torch.all(tensor == r) for r, tensor in enumerate(tensors)), WRONG


def reduce_scatter(rank: Rank, count: int) -> None:
    tensor = torch.empty(count)
    reduce_scatter_single(tensor, torch.ones(rank.size * count))
    assert torch.all(tensor == rank.size), WRONG


def all_to_all(rank: Rank, count: int) -> None:
    tensor = torch.empty(rank.size * count)
    dist.all_to_all_single(tensor, torch.full((rank.size * count,), float(rank.rank)))
    assert torch.equal(tensor, torch.arange(float(rank.size)).repeat_interleave(count)), WRONG


def barrier(rank: Rank, count: int = 0) -> None:
    dist.barrier()


def swap(tensor: torch.Tensor, peer: int, first: bool) -> None:
    """Send to a rank and receive from it; one of the two goes ``first``."""
    for turn in (dist.send, dist.recv) if first else (dist.recv, dist.send):
        turn(tensor, peer)


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
        assert torch.all(tensor == whole), WRONG
        dist.all_reduce(tensor, async_op=True).wait()
        assert torch.all(tensor == whole * rank.size), WRONG
        if rank.size > 1:
            right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
            into = torch.empty(elements)
            work = dist.isend(torch.full((elements,), float(rank.rank)), right)
            dist.recv(into, left)
            if work is not None:
                work.wait()
            assert torch.all(into == left), WRONG


def transport() -> str:
    """Return what moves the bytes of the default group: "shm" or "gloo"; "" of another backend."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.transport() if hasattr(backend, "transport") else ""
