"""Every rank's own launch, ranks being streams of one process on a GPU: all kernels between ranks against the oracle.

The launches of a call run at the same time, as all their programs fit on the device at once: ranks times channels are
fewer than its multiprocessors. The host allocates nothing and loads no code between them, which could wait for a
kernel that waits. In a process of its own, whose streams each have a queue of the device.
"""

import random
import time
from typing import Any

import pytest
import torch
from peer_ranks import DEVICE_SPINS, Call, Case, buffers_on, fault_of
from test_peer_exchange import KINDS, any_case
from world import Worlds

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DEADLINE = 100.0  # seconds; the first call starts a context and compiles
# Not all, as each takes a second to compile.
TYPES = {torch.float32, torch.bfloat16, torch.int64, torch.uint8, None}


def launch_on_streams(call: Call, buffers: list[Any], absent: int | None = None) -> None:
    """Launches what each rank runs, at once; `absent` launches nothing."""
    streams = [torch.cuda.Stream(DEVICE) for _ in buffers]
    torch.cuda.synchronize(DEVICE)
    for rank, stream in enumerate(streams):
        if rank != absent:
            with torch.cuda.stream(stream):
                call.launch(rank, buffers[rank])
    torch.cuda.synchronize(DEVICE)


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_any_calls_on_the_same_buffers_are_the_oracle(
    collective: str, algorithm: str, compiled: Worlds
) -> None:
    choose = random.Random(1)
    cases = [
        case
        for case in (any_case(choose, in_place=False) for _ in range(1000))
        if (case.collective, case.algorithm) == (collective, algorithm)
        and {case.dtype, case.wire} <= TYPES
    ]
    assert len(cases) > 40
    for ranks in (2, 4):
        (compared,) = compiled(1).run(played, cases, ranks, init=False, deadline=DEADLINE)
        assert compared > 10_000


def played(cases: list[Case], ranks: int) -> int:
    from fastcoll.kernels.peers import PeerLayout

    buffers = buffers_on(DEVICE, ranks, PeerLayout(2, 1024, 4, 512))
    compared = 0
    for case in cases:
        call = Call.of(case, ranks, DEVICE)
        launch_on_streams(call, buffers)
        for each in buffers:
            each.check()
        compared += call.compare()
    return compared


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_a_rank_that_never_launches_is_named(
    collective: str, algorithm: str, compiled: Worlds
) -> None:
    absent = 1
    (faults,) = compiled(1).run(
        without_rank, collective, algorithm, absent, init=False, deadline=DEADLINE
    )
    assert set(faults) == {0, 2}
    for peer, _, missing, text in faults.values():
        assert peer == absent or (algorithm == "ring" and missing == [absent])
        assert f"within {DEVICE_SPINS // 10} polls" in text


def test_a_wait_lasts_at_least_as_long_as_its_limit_says(compiled: Worlds) -> None:
    (lasted,) = compiled(1).run(long_wait, 0.5, init=False, deadline=DEADLINE)
    print(f"A wait limited to 0.5 s lasted {lasted:.2f} s.")
    assert lasted >= 0.5


def long_wait(seconds: float) -> float:
    from fastcoll.cuda.mapping import TorchSymmetricMemory
    from fastcoll.kernels.peers import PeerFault, PeerLayout

    polls = int(seconds * TorchSymmetricMemory.polls_per_second)
    call = Call.of(Case("all_reduce", "one_shot", torch.float32, 4, seed=1), 2, DEVICE)
    lasted = 0.0
    for limit in (1, polls):  # the first one compiles
        buffers = buffers_on(DEVICE, 2, PeerLayout(2, 1024, 4, 512), limit)
        torch.cuda.synchronize(DEVICE)
        before = time.perf_counter()
        call.launch(0, buffers[0])
        torch.cuda.synchronize(DEVICE)
        lasted = time.perf_counter() - before
        with pytest.raises(PeerFault):
            buffers[0].check()
    return lasted


def without_rank(
    collective: str, algorithm: str, absent: int
) -> dict[int, tuple[int, int, list[int], str]]:
    from fastcoll.kernels.peers import PeerLayout

    ranks = 3
    buffers = buffers_on(DEVICE, ranks, PeerLayout(2, 1024, 4, 512), DEVICE_SPINS // 10)
    call = Call.of(Case(collective, algorithm, torch.float32, 960, seed=1), ranks, DEVICE)
    launch_on_streams(call, buffers, absent)
    faults = {each.rank: fault_of(each) for each in buffers}
    return {rank: fault for rank, fault in faults.items() if fault is not None}
