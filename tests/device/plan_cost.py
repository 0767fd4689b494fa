"""Prints as JSON what a rank's calls on a CUDA tensor cost the host, on the stand-ins: nanoseconds and allocations.

``python tests/device/plan_cost.py [rounds [way ...]]``. A round makes 2000 calls each way, and then waits until the
watchdog has seen their ends. Figures are for 2000 calls: the calling thread's CPU time, as the median of the rounds,
and the most allocations. The variable WORLD_SIZE=2 starts two ranks, which compare their calls, but not with
FASTCOLL_SHARED_MEMORY=off. The figures are of rank 0. NCCL's stand-in then moves nothing, so no rank waits.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CALLS = 2000
SIZE = int(os.environ.get("WORLD_SIZE", "1"))
BFLOAT16 = 9  # ncclBfloat16


class Cost(ctypes.Structure):
    _fields_ = [("allocations", ctypes.c_size_t), ("nanoseconds", ctypes.c_double)]


def build(folder: Path, name: str = "libcuda.so.1") -> Path:
    """Builds the library that repeats calls; with this name it is found as the driver."""
    library = folder / name
    source = Path(__file__).with_name("repeated_calls.c")
    flags = [
        "-O2",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-Wl,-soname,{library.name}",
    ]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return library


def repeat_plan(plan: object, count: int, library: ctypes.CDLL) -> Cost:
    """Runs a plan so often. Without the GIL, unless the library is a PyDLL."""
    run = ctypes.c_void_p.from_address(id(plan) + object.__basicsize__)  # its vectorcall function
    library.repeatPlan.restype = Cost
    return library.repeatPlan(run, ctypes.py_object(plan), ctypes.c_size_t(count))


def nccl_call(x, y):
    """Returns what makes the bare call so often, on a communicator of its own."""
    import torch
    from device_ranks import stand_in

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    nccl, unique, communicator = stand_in(), UniqueId(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1, unique, 0) == 0
    repeat = ctypes.CDLL("libcuda.so.1").repeatCall
    repeat.restype = Cost
    stream = torch.accelerator.current_stream().native_handle
    given = [*map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr())), ctypes.c_size_t(x.numel())]
    given += [ctypes.c_int(BFLOAT16), communicator, ctypes.c_void_p(stream)]
    return lambda count: repeat(nccl.ncclAllGather, *given, ctypes.c_size_t(count))


def measure(rank: int, folder: Path, rounds: int, chosen: list[str]) -> dict[str, dict[str, float]]:
    import device_ranks

    device_ranks.prepare()
    import recording_device
    import torch
    import torch.distributed as dist

    import fastcoll

    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=SIZE)
    x = torch.ones(64, dtype=torch.bfloat16, device=device_ranks.DEVICE)
    y = x.repeat(SIZE)
    comm = fastcoll.communicator()
    plan = comm.all_gather_plan(y, x)
    plan()
    if SIZE > 1:
        device_ranks.inject("skip * 0 0 2000000000")

    def repeated(call):
        def cost(count):
            begin = time.thread_time_ns()
            for _ in range(count):
                call()
            return Cost(0, time.thread_time_ns() - begin)

        return cost

    unlocked, locked = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    ways = {
        "plan": lambda count: repeat_plan(plan, count, unlocked),
        "plan with the GIL": lambda count: repeat_plan(plan, count, locked),
        "NCCL": nccl_call(x, y),
        "plan in Python": repeated(plan),
        "call of a communicator": repeated(lambda: comm.all_gather(y, x)),
        "call of torch": repeated(lambda: dist.all_gather_into_tensor(y, x)),
        "asynchronous call of torch": repeated(
            lambda: dist.all_gather_into_tensor(y, x, async_op=True).wait()
        ),
    }
    costs = {way: [] for way in chosen or ways}
    with recording_device.quiet():
        for at in range(rounds + 3):  # the first ones make the records that later ones use again
            for way, found in costs.items():
                cost = ways[way](CALLS)
                time.sleep(0.15)  # a turn of the watchdog
                if at >= 3:
                    found.append(cost)
    dist.barrier()
    return {
        way: {
            "nanoseconds": statistics.median(one.nanoseconds for one in found),
            "allocations": max(one.allocations for one in found),
        }
        for way, found in costs.items()
    }


if __name__ == "__main__":
    if "libcuda.so.1" in os.environ.get("LD_PRELOAD", ""):
        rank, folder, rounds, *chosen = sys.argv[1:]
        costs = measure(int(rank), Path(folder), int(rounds), chosen)
        if rank == "0":
            print(json.dumps(costs))
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        with tempfile.TemporaryDirectory() as folder:
            preload = f"{build(Path(folder))} {os.environ.get('LD_PRELOAD', '')}"
            environment = {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": ":".join(sys.path)}
            given = sys.argv[1:] or ["9"]
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, str(rank), folder, *given], env=environment
                )
                for rank in range(SIZE)
            ]
            sys.exit(max(abs(rank.wait()) for rank in ranks))
