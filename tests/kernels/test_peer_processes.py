"""Ranks that are processes on one GPU, whose memory torch symmetric memory maps into each other.

The device gives each process a slice of time in turn, milliseconds long, so a rank that waits spends its slice on
polls: few and small calls, and a limit far beyond what they need. What cannot be set up is a failure.
"""

import pytest
import torch
import torch.distributed as dist
from peer_ranks import Call, Case, fault_of, here

pytestmark = pytest.mark.gpu

SECONDS = 40.0
FEW_SECONDS = 0.1
CASES = [
    Case("all_reduce", "one_shot", torch.float32, 3001, op="avg", scale=1 / 3, seed=1),
    Case("all_reduce", "one_shot", torch.float32, 3001, wire=torch.bfloat16, offset=1, seed=2),
    Case("all_reduce", "two_shot", torch.bfloat16, 5003, op="avg", seed=3),
    Case("all_reduce", "two_shot", torch.float32, 4096, in_place=True, seed=4),
    Case("all_gather", "ring", torch.uint8, 999, seed=6),
    Case("all_reduce", "ring", torch.float32, 2001, wire=torch.bfloat16, seed=7),
    Case("reduce_scatter", "ring", torch.bfloat16, 640, seed=8),
    Case("all_reduce", "one_shot", torch.float32, 1, seed=9),
]


def mapped_regions(size: int) -> tuple[torch.Tensor, list[int]]:
    """Returns this rank's memory, zero, and the addresses of all ranks' memory as this process maps it.

    Collective; leaves a process group, which the caller ends.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    torch.cuda.set_device(0)
    store = dist.FileStore(str(here().scratch / "store"), here().size)
    dist.init_process_group("gloo", store=store, rank=here().rank, world_size=here().size)
    memory = symmetric_memory.empty(size, dtype=torch.uint8, device="cuda:0")
    handle = symmetric_memory.rendezvous(memory, dist.group.WORLD)
    memory.zero_()
    memory.handle = handle  # peers' memory stays mapped as long as it lives
    torch.cuda.synchronize()
    dist.barrier()
    return memory, list(handle.buffer_ptrs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_between_processes_are_the_oracle(ranks, compiled):
    compared = compiled(ranks).run(played_as_rank, CASES, init=False, deadline=110)
    assert all(number > 10_000 for number in compared)


def played_as_rank(cases: list[Case]) -> int:
    from fastcoll.kernels.peers import PeerBuffers, PeerLayout

    rank, layout = here().rank, PeerLayout(2, 8192, 4, 4096)
    memory, addresses = mapped_regions(layout.bytes)
    buffers = PeerBuffers(rank, memory, addresses, layout, SECONDS)
    compared = 0
    for case in cases:
        call = Call.of(case, here().size, memory.device)
        call.launch(rank, buffers)
        buffers.check()
        compared += call.compare(rank)
    dist.barrier()  # peers read this rank's memory until they have ended
    dist.destroy_process_group()
    return compared


def test_a_process_that_never_launches_is_named(compiled):
    fault, late = compiled(2).run(beside_an_absent_process, init=False)
    assert late is None
    peer, _, missing, text = fault
    assert (peer, missing) == (1, [])
    assert f"expected rank 1 to have its message ready within {FEW_SECONDS} s" in text


def beside_an_absent_process() -> tuple[int, int, list[int], str] | None:
    from fastcoll.kernels.peers import PeerBuffers, PeerLayout

    layout = PeerLayout(2, 8192, 4, 4096)
    memory, addresses = mapped_regions(layout.bytes)
    buffers = PeerBuffers(here().rank, memory, addresses, layout, FEW_SECONDS)
    found = None
    if here().rank == 0:
        case = Case("all_reduce", "two_shot", torch.float32, 3000)
        Call.of(case, 2, memory.device).launch(0, buffers)
        found = fault_of(buffers)
    dist.barrier()
    dist.destroy_process_group()
    return found
