"""Every rank's own launch, ranks being streams of one process on a GPU: all kernels between ranks against the oracle.

The launches of a call run at the same time, as all their programs fit on the device at once: ranks times channels are
fewer than its multiprocessors. The host allocates nothing and loads no code between them, which could wait for a
kernel that waits. In a process of its own, whose streams each have a queue of the device.
"""

import os
import random
import time
from typing import Any

import pytest
import torch
from peer_ranks import Call, Case, buffers_on, fault_of
from test_peer_exchange import KINDS, any_case

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DEADLINE = 100.0  # seconds; the first call starts a context and compiles
SOAK = float(os.environ.get("FASTCOLL_TEST_SOAK", "5"))  # tools/gpu.sh experiment: minutes
BATCH = 1000  # rounds between two comparisons
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
def test_any_calls_on_the_same_buffers_are_the_oracle(collective, algorithm, compiled):
    choose = random.Random(1)
    cases = [
        case
        for case in (any_case(choose, in_place=False) for _ in range(1000))
        if (case.collective, case.algorithm) == (collective, algorithm)
        and {case.dtype, case.wire} <= TYPES
    ]
    assert len(cases) > 40
    for ranks in (2, 4, 8):
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
def test_a_rank_that_never_launches_is_named(collective, algorithm, compiled):
    absent = 1
    (faults,) = compiled(1).run(
        without_rank, collective, algorithm, absent, init=False, deadline=DEADLINE
    )
    assert set(faults) == {0, 2}
    for peer, _, missing, text in faults.values():
        assert peer == absent or (algorithm == "ring" and missing == [absent])
        assert "within 0.5 s" in text


def test_rounds_of_any_calls_with_pauses_keep_every_bit(compiled):
    """Eight ranks with all channels that fit: sizes, kernels, order of the launches and pauses are random."""
    (rounds,) = compiled(1).run(soaked, SOAK, 8, init=False, deadline=DEADLINE + SOAK)
    print(f"{rounds} rounds of 8 ranks in {SOAK:.0f} s")
    assert rounds >= BATCH


def soaked(seconds: float, ranks: int) -> int:
    from fastcoll.cuda.mapping_decision import REGION_SIZES
    from fastcoll.kernels.peers import PeerLayout

    choose = random.Random(2)
    resident = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    channels = min(REGION_SIZES.channels, resident // ranks)
    layout = PeerLayout(
        channels, REGION_SIZES.stage_bytes, REGION_SIZES.slots, REGION_SIZES.slot_bytes
    )
    buffers = buffers_on(DEVICE, ranks, layout)
    calls = [Call.of(random_case(choose), ranks, DEVICE) for _ in range(48)]
    launches = [[call.prepared(rank, each) for rank, each in enumerate(buffers)] for call in calls]
    streams = [torch.cuda.Stream(DEVICE) for _ in buffers]
    torch.cuda.synchronize(DEVICE)
    rounds, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        used = set()
        for call in calls:
            for out in call.outs:
                out.fill_(7)
        torch.cuda.synchronize(DEVICE)
        for _ in range(BATCH):
            number = choose.randrange(len(calls))
            used.add(number)
            for rank in choose.sample(range(ranks), ranks):
                with torch.cuda.stream(streams[rank]):
                    if choose.random() < 0.01:
                        torch.cuda._sleep(choose.randrange(200_000))  # cycles
                    launches[number][rank]()
        torch.cuda.synchronize(DEVICE)
        for each in buffers:
            each.check()
        for number in used:
            calls[number].compare()
        rounds += BATCH
    return rounds


def random_case(choose: random.Random) -> Case:
    """Returns a call of at most 1 MiB, most of them short."""
    collective, algorithm = choose.choice(KINDS)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    count = int(2 ** choose.uniform(0, 17))
    return Case(collective, algorithm, dtype, count, seed=choose.randrange(1, 1000))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_captured_launches_of_all_ranks_are_replayed(algorithm, compiled):
    """Counters lie on the device, so each replay is a round of its own. The benchmark's times are of such graphs."""
    (compared,) = compiled(1).run(replayed, algorithm, init=False, deadline=DEADLINE)
    assert compared == 3 * 4 * 20_001


def replayed(algorithm: str) -> int:
    from fastcoll.bench.peer_cases import on_streams
    from fastcoll.kernels.peers import PeerLayout

    ranks, compared = 4, 0
    buffers = buffers_on(DEVICE, ranks, PeerLayout(2, 1024, 4, 512))
    call = Call.of(Case("all_reduce", algorithm, torch.float32, 20_001, seed=1), ranks, DEVICE)
    launches = [call.prepared(rank, buffers[rank]) for rank in range(ranks)]
    torch.cuda.synchronize(DEVICE)
    work = on_streams(launches, DEVICE)
    work()
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        for out in call.outs:
            out.fill_(7)
        graph.replay()
        for each in buffers:
            each.check()
        compared += call.compare()
    return compared


def without_rank(
    collective: str, algorithm: str, absent: int
) -> dict[int, tuple[int, int, list[int], str]]:
    from fastcoll.kernels.peers import PeerLayout

    ranks = 3
    buffers = buffers_on(DEVICE, ranks, PeerLayout(2, 1024, 4, 512), 0.5)
    call = Call.of(Case(collective, algorithm, torch.float32, 960, seed=1), ranks, DEVICE)
    start = time.monotonic()
    launch_on_streams(call, buffers, absent)
    assert time.monotonic() - start >= 0.5
    faults = {each.rank: fault_of(each) for each in buffers}
    return {rank: fault for rank, fault in faults.items() if fault is not None}
