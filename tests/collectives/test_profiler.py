"""What the profiler sees of a collective."""

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, IS_GLOO, beyond_gloo, wait_all
from collective_cases import Case, run
from on_ranks import on_ranks
from torch.profiler import ProfilerActivity, profile


def profiled(collective):
    """Titles and shapes of all events of a call that is not the first."""
    case = Case(collective, shape=(3, 2))
    run(case)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as session:
        run(case)
    return [(event.name, event.input_shapes) for event in session.events()]


def titled(events, title):
    return [shapes for name, shapes in events if name == f"{BACKEND}:{title}"]


SHAPED = ["all_reduce", "broadcast", "reduce", "all_gather", "gather", "all_to_all_single"]


@pytest.mark.parametrize(
    ("collective", "titles"),
    [
        *(
            (name, [name.removesuffix("_single")])
            for name in [*SHAPED, "scatter", "barrier", "all_to_all"]
        ),
        pytest.param("reduce_scatter", ["reduce_scatter"], marks=beyond_gloo("has no title")),
        ("ring", ["send", "recv"]),
        ("all_gather_single", []),
        ("reduce_scatter_single", []),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
@on_ranks(2)
def test_titles_and_shapes(collective, titles):
    """Also Kineto's span of communication parameters, which trace analysers read."""
    events = profiled(collective)
    assert IS_GLOO or "record_param_comms" in [title for title, _ in events]
    for title in titles:
        (shapes,) = titled(events, title)
        assert collective not in SHAPED or [3, 2] in shapes or [6, 2] in shapes, shapes


@on_ranks(2)
def test_asynchronous():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as session:
        wait_all([dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)])
    found = [event for event in session.events() if event.name == f"{BACKEND}:all_reduce"]
    assert len(found) == 3
    for event in found:
        assert event.is_async and event.input_shapes == [[5]]
