"""All ranks in one launch on a GPU against the oracle, and what it refuses.

Programs of different ranks wait for each other. One that is not on the device never posts its flag, and is not
started before another ends: so there may be as many, ranks times channels, as are resident at once. Each
multiprocessor takes one at least, whatever its registers, and an H200 has 132.
"""

import itertools

import pytest
import torch
from peer_ranks import Call, Case, buffers_on

from fastcoll.kernels.peers import PeerLayout

CHANNELS = 6
LAYOUT = PeerLayout(CHANNELS, stage_bytes=4096, slots=4, slot_bytes=2048)
DTYPES = [torch.float32, torch.bfloat16]
KINDS = [
    ("one_shot", "all_reduce"),
    ("two_shot", "all_reduce"),
    ("ring", "all_reduce"),
    ("ring", "reduce_scatter"),
]
OPS = ["sum", "avg", "min", "max", "product"]
# Less than a block, odd, several rounds of every channel.
COUNTS = [1, 15, 1000, 4096, 50_001]


def cases_of(algorithm: str, collective: str) -> list[Case]:
    """Every dtype with every size, operations in turns; chunks of a reduce-scatter must be aligned."""
    cases = []
    for number, (dtype, count) in enumerate(itertools.product(DTYPES, COUNTS)):
        op = OPS[(number + number // len(OPS)) % len(OPS)]
        scale = [1.0, 1 / 3, -2.7][number % 3]
        whole = -(-count // 16) * 16 if collective == "reduce_scatter" else count
        cases.append(Case(collective, algorithm, dtype, whole, op=op, scale=scale, seed=number))
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("algorithm", "collective"), KINDS)
def test_one_launch_of_all_ranks_is_the_oracle(
    gpu: torch.device, algorithm: str, collective: str, ranks: int
) -> None:
    from fastcoll.kernels.every_rank import prepare_every_rank

    assert ranks * CHANNELS <= torch.cuda.get_device_properties(gpu).multi_processor_count
    buffers = buffers_on(gpu, ranks, LAYOUT)
    calls = [Call.of(case, ranks, gpu) for case in cases_of(algorithm, collective)]
    for call in calls:  # one after the other, with no barrier between
        sides = (call.sources, call.outs, buffers)
        options = {"op": call.case.op, "scale": call.case.scale}
        prepare_every_rank(algorithm, collective, *sides, **options)()
    for each in buffers:
        each.check()
    assert all(call.compare() for call in calls)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_captured_launch_is_replayed(gpu: torch.device, algorithm: str) -> None:
    """Counters lie on the device: each replay is a round of its own."""
    from fastcoll.kernels.every_rank import prepare_every_rank

    ranks = 4
    buffers = buffers_on(gpu, ranks, LAYOUT)
    call = Call.of(Case("all_reduce", algorithm, torch.float32, 20_001, seed=1), ranks, gpu)
    torch.cuda.synchronize(gpu)
    stream = torch.cuda.Stream(gpu)  # a launch is captured on the stream on which it was prepared
    with torch.cuda.stream(stream):
        sides = (call.sources, call.outs, buffers)
        launch = prepare_every_rank(algorithm, "all_reduce", *sides)
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    for _ in range(3):
        for out in call.outs:
            out.fill_(7)
        graph.replay()
        for each in buffers:
            each.check()
        assert call.compare()


def test_one_rank_is_played_by_the_interpreter_too() -> None:
    """The comparison itself, where no GPU is; more ranks would wait for programs that never start."""
    from fastcoll.kernels.every_rank import prepare_every_rank

    cpu = torch.device("cpu")
    buffers = buffers_on(cpu, 1, PeerLayout(1, 1024, 4, 512))
    case = Case("all_reduce", "one_shot", torch.float32, 333, op="avg", scale=1 / 3)
    call = Call.of(case, 1, cpu)
    with pytest.raises(AssertionError, match="333 of 333 elements differ"):
        call.compare()
    options = {"op": case.op, "scale": case.scale}
    prepare_every_rank("one_shot", "all_reduce", call.sources, call.outs, buffers, **options)()
    assert call.compare() == 333


def test_more_programs_than_run_at_once_are_refused() -> None:
    """They would wait forever for those that never start."""
    from fastcoll.kernels.every_rank import prepare_every_rank

    buffers = buffers_on(torch.device("cpu"), 2, PeerLayout(1, 1024, 4, 512))
    tensors = [torch.ones(64) for _ in buffers]
    with pytest.raises(ValueError, match="at most the 1 programs that run at once, got 2 times 1"):
        prepare_every_rank("one_shot", "all_reduce", tensors, tensors, buffers)
