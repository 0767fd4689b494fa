"""Calls that NCCL serves run no line of Python and never take the GIL, from the process group's entry to its return.

The caller here holds no GIL either, as DDP's reducer does not: TorchScript runs a loop without it.
"""

import ctypes
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single, reduce_scatter_single
from device_ranks import DEVICE, build_stand_in
from on_ranks import on_ranks
from plan_cost import build, repeat_plan
from torch.distributed.distributed_c10d import _coalescing_manager
from world import here

import fastcoll

CALLS = 2000  # a tenth of a second
SECONDS = 60  # of a busy machine; a call that takes the GIL never ends within any time
PACKAGE = str(Path(fastcoll.__file__).parent)


@torch.jit.script
def reduce_often(x: torch.Tensor, count: int, group: str):
    for _ in range(count):
        torch.ops._c10d_functional.all_reduce_(x, "avg", group)


def waited_for(x):
    """The calls' works are torch's until then; its own wait has a kernel in Python."""
    return torch.ops._c10d_functional.wait_tensor(x)


@pytest.mark.parametrize("way", ["calls", "plan"])
@pytest.mark.parametrize("size", [2, 3])
@on_ranks(world="nccl_world")
def test_no_call_takes_the_gil(size, way):
    """Calls go on beside a thread that keeps it, and so do the runs of a plan."""
    library = ctypes.PyDLL(str(build_stand_in()))  # whose functions keep the GIL
    count = library.fakeNcclCallCount
    sleep = ctypes.PyDLL(None).usleep
    group = dist.group.WORLD.group_name
    x = torch.ones(8, device=DEVICE)
    reduce_often(x, 2, group)  # what is made once, and TorchScript's own compilation
    reduce_often(waited_for(x), 2, group)
    waited_for(x).fill_(1 + dist.get_rank())
    if way == "plan":
        plan = fastcoll.communicator().all_reduce_plan(x, dist.ReduceOp.AVG)
        plan()
        x.fill_(1 + dist.get_rank())
        folder = here().scratch / f"rank{here().rank} of {size}"
        folder.mkdir(exist_ok=True)
        repeated = ctypes.CDLL(str(build(folder, "repeated_calls.so")))
        caller = threading.Thread(target=repeat_plan, args=(plan, CALLS, repeated))
    else:
        caller = threading.Thread(target=reduce_often, args=(x, CALLS, group))
    library.fakeNcclClearCalls()  # there is room for so many
    interval = sys.getswitchinterval()
    caller.start()
    while count() == 0:  # it has the GIL until it is in TorchScript
        time.sleep(0)
    sys.setswitchinterval(1000)
    try:
        first, end = count(), time.monotonic() + SECONDS
        while count() < CALLS and time.monotonic() < end:
            sleep(100)  # no other thread gets the GIL meanwhile, and each gets a core
        kept = count()
    finally:
        sys.setswitchinterval(interval)
    caller.join()
    assert first < CALLS, "all calls were made before the GIL was kept"
    assert kept == CALLS
    assert waited_for(x).cpu().tolist() == [(1 + size) / 2] * 8


@on_ranks(2, world="nccl_world")
def test_calls_run_no_line_of_python():
    seen: list[str] = []

    def trace(frame, event, _):
        if frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return trace
        return None

    def traced(*calls):
        seen.clear()
        sys.settrace(trace)
        try:
            for call in calls:
                call()
        finally:
            sys.settrace(None)
        return list(seen)

    own, ranks = dist.new_group(), dist.get_world_size()
    x = torch.ones(8, device=DEVICE)
    whole = torch.ones(8 * ranks, device=DEVICE)
    right, left = (dist.get_rank() + 1) % ranks, (dist.get_rank() - 1) % ranks

    def messages():
        with _coalescing_manager(own, torch.device(DEVICE, 0), async_ops=True) as manager:
            dist.isend(x, right, own)
            dist.irecv(torch.empty_like(x), left, own)
        manager.wait()

    calls = (
        lambda: dist.all_reduce(x, group=own),
        lambda: dist.all_reduce(x, dist.ReduceOp.MAX, own, async_op=True).wait(),
        lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(0.5), own),
        lambda: dist.broadcast(x, 0, own),
        lambda: dist.reduce(x, 0, group=own),
        lambda: all_gather_single(whole, x, own),
        lambda: reduce_scatter_single(x, whole, group=own),
        lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=own),
        messages,
    )
    assert traced(*calls), "the first call makes the communicator, in Python"
    assert traced(*calls) == []
