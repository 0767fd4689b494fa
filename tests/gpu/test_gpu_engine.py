"""The engine of device tensors on a GPU: what the recording device showed without one, with NCCL itself.

World size 1 is the usual NCCL; 2 and 3 ranks share the GPU and show correctness only.
"""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from backend import all_gather_single
from engine_cases import BETWEEN, CASES
from killed import killed
from on_ranks import on_ranks
from suite_rules import bound
from torch._C._distributed_c10d import ErrorType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from training import assert_like, network, sharded, train, train_alone

import fastcoll

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@on_ranks(world="gpu_world")
def test_every_call(size, async_op):
    """One call of the fixture for all cases: starting NCCL takes longer than they do."""
    for case in CASES:
        if dist.get_world_size() > 1 or case not in BETWEEN:
            case(async_op)
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_world")
def test_types(size):
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8,
             torch.int32, torch.int64, torch.uint32, torch.uint64, torch.complex64]  # fmt: skip
    size, me = dist.get_world_size(), dist.get_rank()
    for dtype in kinds:
        x = torch.full((300,), 1 + me).to(dtype).to(DEVICE)
        dist.all_reduce(x)
        assert x.cpu().eq(torch.full((300,), size * (size + 1) // 2).to(dtype)).all(), dtype
    for dtype in (*kinds, torch.bool, torch.float8_e4m3fn, torch.int16):
        raw = torch.arange(64, dtype=torch.uint8).repeat(dtype.itemsize) % 2
        given = raw.view(dtype).to(DEVICE)
        x = given if me == 0 else torch.zeros_like(given)
        dist.broadcast(x, 0)
        assert torch.equal(x.cpu().view(torch.uint8), raw), dtype
    flags = torch.tensor([me == 0, False, True], device=DEVICE)
    dist.all_reduce(flags)
    assert flags.tolist() == [True, False, True]


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_world", fresh=True)
def test_training(size):
    expected = train_alone(3, size, model=network(torch.float, 256))
    for split in (partial(DistributedDataParallel, bucket_cap_mb=0.1), sharded):
        model = split(network(torch.float, 256).to(DEVICE))
        train(model, 3)
        assert_like(model, expected, 1e-5)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_world")
def test_cpu_tensors_beside_stock_nccl(size):
    """The advice of README: fastcoll for CPU tensors and objects, torch's own backend for CUDA tensors."""
    group = dist.new_group(backend="cpu:fastcoll,cuda:nccl")
    ranks, me = dist.get_world_size(), dist.get_rank()
    for device in ("cpu", DEVICE):
        x = torch.full((1000,), 1.0 + me, device=device)
        dist.all_reduce(x, group=group)
        assert x.cpu().eq(ranks * (ranks + 1) / 2).all()
    found = [None] * ranks
    dist.all_gather_object(found, {"rank": me}, group)
    assert found == [{"rank": rank} for rank in range(ranks)]
    (told,) = (each for each in fastcoll.info.groups() if each["name"] == group.group_name)
    assert told["backends"] == {"cpu": "fastcoll", "cuda": "nccl"}


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_world")
def test_graphs(size, async_op):
    """A graph replays the calls; the watchdog asks nothing of it, and calls of other kinds go on."""
    x = torch.ones(1000, device=DEVICE)
    factor = torch.full((1,), 2.0, device=DEVICE)
    halves = dist._make_nccl_premul_sum(factor)  # at one rank, too, something is launched
    dist.all_reduce(x, halves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = dist.all_reduce(x, halves, async_op=async_op)
        if work is not None:
            work.wait()
        x += 1
        time.sleep(0.5)  # the watchdog looks meanwhile
    x.fill_(1)
    expected, size = 1.0, dist.get_world_size()
    for _ in range(4):
        graph.replay()
        expected = 2 * size * expected + 1
    assert x.cpu().eq(expected).all()
    dist.all_reduce(x, async_op=True).wait()
    assert x.cpu().eq(expected * size).all()


@on_ranks(1, world="gpu_world")
def test_profiler_and_times():
    x = torch.ones(1000, device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True).wait()
        torch.cuda.synchronize()
    names = {event.key for event in found.key_averages()}
    assert "fastcoll:all_reduce" in names, names
    own = dist.new_group()
    own._enable_collectives_timing()
    dist.all_reduce(x, dist.ReduceOp.AVG, group=own)
    work = dist.all_reduce(x, dist.ReduceOp.AVG, group=own, async_op=True)
    work.wait()
    torch.cuda.synchronize()
    assert work._get_duration() > 0


@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="gpu_world")
def test_memory(size):
    """Tensors that nobody holds and nobody waits for are not given to others while they are in use."""
    stream = torch.cuda.Stream()
    for index in range(50):
        x = torch.full((1 << 20,), float(index), device=DEVICE)
        y = torch.empty(dist.get_world_size() << 20, device=DEVICE)
        work = all_gather_single(y, x, async_op=True)
        del x
        torch.full((1 << 20,), -1.0, device=DEVICE)  # would get its memory
        with torch.cuda.stream(stream):
            torch.full((1 << 20,), -2.0, device=DEVICE)
        work.wait()
        assert y.eq(float(index)).all()


@on_ranks(2, world="gpu_world", fresh=True)
def test_a_rank_that_never_arrives():
    own = dist.new_group(timeout=timedelta(seconds=3))
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, group=own)
    torch.cuda.synchronize()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        if dist.get_rank() == 0:
            dist.all_reduce(x, group=own, async_op=True).wait(timedelta(seconds=30))
        backend = own._get_backend(torch.device(DEVICE))
        while backend.get_error() == ErrorType.SUCCESS:  # until the other rank is told
            time.sleep(0.1)
            assert time.monotonic() - start < bound(8)
        dist.all_reduce(x, group=own)
    took = time.monotonic() - start
    assert 2.5 < took < bound(4)
    if dist.get_rank() == 0:
        assert "timed out after 3000 ms" in str(caught.value)
        assert "rank 1 completed call 1 of 1, under way: nothing" in str(caught.value)
    else:
        assert "another rank met a fault: rank 0: all_reduce(seq 2" in str(caught.value)
    return took


@on_ranks(1, world="gpu_world")
def test_blocking_wait():
    own = dist.new_group(pg_options=fastcoll.Options(blocking_wait=True))
    x = torch.ones(1 << 24, device=DEVICE)
    for _ in range(3):
        dist.all_reduce(x, dist.ReduceOp.AVG, group=own)
        assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("backend", ["fastcoll", "nccl"])
def test_a_killed_rank_whose_memory_stays_mapped(backend, gpu_memory_world):
    """Prints which backend names a rank that is killed beside it, and when; without an error, the calls hang."""
    if (version := torch.cuda.nccl.version()) < (2, 30, 3):
        pytest.skip(f"NCCL {version} lets ranks of a host share no GPU")
    text, seconds = gpu_memory_world(2).run(killed, backend, DEVICE, 10.0, dying=[1], deadline=90)[
        0
    ]
    print(f"a killed rank: {backend}, after {seconds:.1f} s: {text or 'no error'}")
    assert backend == "nccl" or "rank 1" in text
