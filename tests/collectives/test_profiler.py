"""What the profiler sees of a collective."""

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, all_gather_single, beyond_gloo, reduce_scatter_single
from torch.profiler import ProfilerActivity, profile


def collectives():
    mine, size = dist.get_rank(), dist.get_world_size()
    tensor, wide = torch.ones(3, 2), torch.ones(3 * size, 2)
    many = [torch.ones(3, 2) for _ in range(size)]
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "reduce": lambda: dist.reduce(tensor, 0),
        "all_gather": lambda: dist.all_gather(many, tensor),
        "gather": lambda: dist.gather(tensor, many if mine == 0 else None, 0),
        "scatter": lambda: dist.scatter(tensor, many if mine == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all_single(wide, wide.clone()),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, many),
        "_all_gather_base": lambda: all_gather_single(wide, tensor),
        "_reduce_scatter_base": lambda: reduce_scatter_single(tensor, wide),
        "send": lambda: dist.send(tensor, 1) if mine == 0 else dist.recv(tensor, 0),
        "barrier": dist.barrier,
    }


def profiled(name):
    call = collectives()[name]
    call()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as session:
        call()
    return [(event.name, event.input_shapes) for event in session.events()]


def asynchronous():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as session:
        works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
    found = [event for event in session.events() if event.name == f"{BACKEND}:all_reduce"]
    assert len(found) == 3
    for event in found:
        assert event.is_async and event.input_shapes == [[5]]


@pytest.mark.parametrize(
    "name", ["all_reduce", "broadcast", "reduce", "all_gather", "gather", "all_to_all"]
)
def test_title_and_shapes(world, name):
    for events in world(2).run(profiled, name):
        shapes = [shape for title, shape in events if title == f"{BACKEND}:{name}"]
        assert len(shapes) == 1, events
        assert [3, 2] in shapes[0] or [6, 2] in shapes[0], shapes


@pytest.mark.parametrize("name", ["scatter", "barrier"])
def test_title(world, name):
    for events in world(2).run(profiled, name):
        assert [title for title, _ in events].count(f"{BACKEND}:{name}") == 1


@beyond_gloo("has no titles for these")
def test_titles_of_reduce_scatter(world):
    for events in world(2).run(profiled, "reduce_scatter"):
        assert [title for title, _ in events].count(f"{BACKEND}:reduce_scatter") == 1


def test_titles_of_send_and_recv(world):
    first, second = world(2).run(profiled, "send")
    assert [title for title, _ in first].count(f"{BACKEND}:send") == 1
    assert [title for title, _ in second].count(f"{BACKEND}:recv") == 1


def test_asynchronous(world):
    world(2).run(asynchronous)


@beyond_gloo("does not record it")
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "all_to_all",
        "reduce_scatter",
        "_all_gather_base",
        "_reduce_scatter_base",
        "send",
        "barrier",
    ],
)
def test_record_param_comms(world, name):
    """Kineto's span of communication parameters, which trace analysers read."""
    for events in world(2).run(profiled, name):
        assert "record_param_comms" in [title for title, _ in events]
