"""Memory pools that NCCL registers, and the allocator behind them."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import cleared, engine_of, on_stand_in, stand_in
from on_ranks import on_ranks
from world import here

from fastcoll._load_cuda import CUDA
from fastcoll.cuda import memory_pools
from fastcoll.cuda.engine import CudaEngine

pytestmark = on_stand_in(2)

PAGE = 4096


class Pool:
    """What is asked of a torch.cuda.MemPool: its name, and its segments."""

    def __init__(self, number: int, *segments: tuple[int, int, int]) -> None:
        self.id = (number, 0)
        self._segments = segments

    def snapshot(self) -> list[dict[str, int]]:
        return [
            {"device": device, "address": address, "total_size": size}
            for device, address, size in self._segments
        ]


def registered(name: str = "register") -> list[int]:
    """Sizes that NCCL was given, in order."""
    return [arguments["count"] for call, arguments in stand_in.calls() if call == name]


def prepared(name: str, seconds: int = 30) -> CudaEngine:
    """An engine with a communicator of device 0."""
    engine = engine_of(name, seconds)
    engine.prepare(0, -1, False)
    return engine


def test_pools_are_registered():
    engine = prepared("pools")
    with pytest.raises(RuntimeError, match="Give init_process_group a device_id"):
        memory_pools.register("another", Pool(0), False)
    engine.prepare(1, -1, False)
    first = Pool(1, (0, PAGE, PAGE), (0, 8 * PAGE, 3 * PAGE), (1, PAGE, 2 * PAGE))
    memory_pools.register("pools", first, False)
    assert sorted(registered()) == [PAGE, 2 * PAGE, 3 * PAGE]
    with pytest.raises(ValueError, match="got one that is"):
        memory_pools.register("pools", first, False)

    stand_in.clear()
    engine.prepare(0, 1 - here().rank, False)  # made later, of device 0
    assert registered() == [PAGE, 3 * PAGE]

    stand_in.clear()
    memory_pools.deregister("pools", first)
    assert stand_in.names().count("deregister") == 5
    with pytest.raises(ValueError, match="got another one"):
        memory_pools.deregister("pools", first)

    stand_in.clear()
    memory_pools.register("pools", Pool(2, (0, PAGE, PAGE)), True)
    assert registered("windowRegister") == [PAGE, PAGE]
    memory_pools.deregister("pools", Pool(2))
    assert stand_in.names().count("windowDeregister") == 2


def test_what_is_refused_leaves_nothing():
    prepared("refused")
    stand_in.inject("fail", "register", 1, after=1)
    pool = Pool(1, (0, PAGE, PAGE), (0, 8 * PAGE, PAGE))
    with pytest.raises(dist.DistBackendError, match="nccl_register"):
        memory_pools.register("refused", pool, False)
    assert stand_in.names().count("deregister") == 1
    stand_in.clear()
    memory_pools.register("refused", pool, False)


def test_what_cannot_be_taken_back_may_be_tried_again():
    prepared("again")
    pool = Pool(1, (0, PAGE, PAGE), (0, 8 * PAGE, PAGE), (0, 16 * PAGE, PAGE))
    memory_pools.register("again", pool, False)
    stand_in.inject("fail", "deregister", 1)
    with pytest.raises(dist.DistBackendError, match="nccl_deregister"):
        memory_pools.deregister("again", pool)
    assert stand_in.names().count("deregister") == 3
    memory_pools.deregister("again", pool)
    assert stand_in.names().count("deregister") == 4


def test_a_window_that_not_all_ranks_register():
    engine = prepared("w", seconds=1)
    if here().rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"timed out after 1000 ms.*on every rank"):
            memory_pools.register("w", Pool(1, (0, PAGE, PAGE)), True)
        with pytest.raises(dist.DistBackendError, match="the group was aborted"):
            engine.prepare(1, -1, False)


def test_pools_while_communicators_are_made():
    """Each pool is registered with each communicator once, whichever came first."""
    engine = prepared("both")

    def more() -> None:
        for device in range(1, 6):
            engine.prepare(device, -1, False)

    making = threading.Thread(target=more)
    making.start()
    pools = [Pool(number, *[(device, PAGE, PAGE) for device in range(6)]) for number in range(20)]
    for pool in pools:
        memory_pools.register("both", pool, False)
    making.join()
    assert len(registered()) == 20 * 6


@on_ranks(2, world="stand_in_world", around=cleared, kill=True, fresh=True)  # with its torch
def test_the_allocator_is_nccls():
    given = []

    class Plugged:
        """What torch makes of a library and two names; a torch without CUDA has none."""

        def __init__(self, library: str, allocate: str, free: str) -> None:
            loaded = ctypes.CDLL(library)
            self.functions = loaded[allocate], loaded[free]
            given.append(self)

        def allocator(self) -> object:
            return self

    torch.cuda.memory.CUDAPluggableAllocator = Plugged  # type: ignore[misc, assignment]
    group = SimpleNamespace(pg=dist.group.WORLD._get_backend(torch.device("cpu")))
    allocator = group.pg.mem_allocator
    assert allocator is group.pg.mem_allocator is given[0]
    allocate, free = allocator.functions
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    address = allocate(PAGE, 0, None)
    ctypes.memset(address, 1, PAGE)
    free(address, PAGE, 0, None)
    assert stand_in.names() == ["memAlloc", "memFree"]
    CUDA.set_nccl_allocator(0, 0)
    assert allocate(PAGE, 0, None) is None
    with pytest.raises(RuntimeError, match="call one collective before"):
        group.pg.register_mem_pool(Pool(1))
