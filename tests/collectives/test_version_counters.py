"""Which collectives tell autograd that they changed a tensor: those of which gloo tells it, and no others.

An in-place collective on a tensor that autograd has saved (the output of a ReLU) is then an error in backward, or is
not, on every backend alike. NCCL tells of the outputs of all_gather alone, so CUDA tensors follow it; that is in
tests/device. FASTCOLL_DEBUG=TRACE tells of all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single
from fault_list import plays
from torch import Tensor
from world import Worlds


def calls() -> dict[str, tuple[list[Tensor], Callable[[bool], Any]]]:
    """By name: the tensors that are looked at, and the call on two ranks."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()

    def ones(count: int = 4) -> Tensor:
        return torch.ones(count)

    def root(tensors: list[Tensor]) -> list[Tensor] | None:
        return tensors if rank == 0 else None

    found: dict[str, tuple[list[Tensor], Callable[[bool], Any]]] = {}

    def case(name: str, tensors: list[Tensor], call: Callable[[bool], Any]) -> None:
        found[name] = (tensors, call)

    a, b, c, d, e = ones(), ones(), ones(), ones(8), [ones(), ones()]
    case("all_reduce", [a], lambda later: dist.all_reduce(a, async_op=later))
    case("broadcast", [b], lambda later: dist.broadcast(b, 0, async_op=later))
    case("reduce", [c], lambda later: dist.reduce(c, 0, async_op=later))
    f, g = ones(), [ones(), ones()]
    case("all_gather", [f, *g], lambda later: dist.all_gather(g, f, async_op=later))
    h = ones()
    case(
        "all_gather_into_tensor",
        [h, d],
        lambda later: all_gather_single(d, h, async_op=later),
    )
    i, j = ones(), [ones(), ones()]
    case("gather", [i, *j], lambda later: dist.gather(i, root(j), 0, async_op=later))
    k, m = ones(), [ones(), ones()]
    case("scatter", [k, *m], lambda later: dist.scatter(k, root(m), 0, async_op=later))
    n, o = ones(), [ones(), ones()]
    case("reduce_scatter", [n, *o], lambda later: dist.reduce_scatter(n, o, async_op=later))
    p, q = ones(), ones(8)
    case(
        "reduce_scatter_tensor",
        [p, q],
        lambda later: reduce_scatter_single(p, q, async_op=later),
    )
    r, s = [ones(), ones()], [ones(), ones()]
    case("all_to_all", [*r, *s], lambda later: dist.all_to_all(r, s, async_op=later))
    t, u = ones(), ones()
    case("all_to_all_single", [t, u], lambda later: dist.all_to_all_single(t, u, async_op=later))
    case("all_reduce_coalesced", e, lambda later: dist.all_reduce_coalesced(e, async_op=later))
    v = ones()
    if rank == 0:
        case(
            "send and recv",
            [v],
            lambda later: dist.isend(v, other) if later else dist.send(v, other),
        )
    else:
        case(
            "send and recv",
            [v],
            lambda later: dist.irecv(v, other) if later else dist.recv(v, other),
        )
    return found


def changed(later: bool) -> dict[str, list[bool]]:
    """By call, for each of its tensors: whether its version moved."""
    found = {}
    for name, (tensors, call) in calls().items():
        before = [tensor._version for tensor in tensors]
        try:
            work = call(later)
        except RuntimeError as error:  # torch 2.11's gloo has no all_to_all of lists
            assert str(error) == "Backend gloo does not support alltoall", error
            continue
        if later:
            work.wait()
        found[name] = [tensor._version > old for tensor, old in zip(tensors, before, strict=True)]
    return found


def as_gloo_does(later: bool) -> None:
    ours = changed(later)
    group = dist.new_group(backend="gloo")
    world, dist.distributed_c10d.GroupMember.WORLD = dist.group.WORLD, group
    try:
        gloos = changed(later)
    finally:
        dist.distributed_c10d.GroupMember.WORLD = world
    assert len(ours) - len(gloos) <= 1
    assert {name: ours[name] for name in gloos} == gloos
    dist.destroy_process_group(group)


@plays(54)
@pytest.mark.parametrize("later", [False, True], ids=["synchronous", "asynchronous"])
def test_the_same_tensors_as_with_gloo(world, later):
    world(2).run(as_gloo_does, later)


def through_a_relu() -> None:
    weight = torch.ones(4, requires_grad=True)
    hidden = (weight * 2).relu()
    dist.all_reduce(hidden.detach())
    hidden.sum().backward()


def test_what_autograd_saved_may_be_reduced_in_place(world):
    world(2).run(through_a_relu)


def seen_under_trace() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        through_a_relu()


def test_trace_tells_of_every_change(tmp_path):
    worlds = Worlds(tmp_path, environ={"FASTCOLL_DEBUG": "TRACE"})
    try:
        worlds(2).run(seen_under_trace)
    finally:
        worlds.close()
