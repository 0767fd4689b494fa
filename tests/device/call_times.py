"""What a call of NCCL costs the host beside another thread of the process: microseconds, medians of rounds in turns.

    PYTHONPATH=tests:tests/device python tests/device/call_times.py --json bench/results/device_calls_cpu.jsonl

The other thread sleeps, hashes, which takes a processor and not the GIL, or runs Python, which takes both. The device
is the recording one and NCCL its stand-in, so the times are those of the host's way from torch's operator to the
library's call. The caller is a loop in TorchScript, which needs no Python, as DDP's reducer needs none.
"""

import argparse
import ctypes
import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import device_ranks
import recording_device
import torch
import torch.distributed as dist

from fastcoll.bench.record import describe_run, write_record

_CALLS = 2000
_FIRST = 100
"""Calls before the clock is started."""

_BYTES = bytes(1 << 19)
_BESIDE: dict[str, Callable[[], object]] = {
    "asleep": lambda: time.sleep(0.0005),
    "hashing": lambda: hashlib.sha256(_BYTES),
    "python": lambda: sum(range(20_000)),
}
"""What the other thread does, again and again."""


@torch.jit.script
def _many(tensor: torch.Tensor, calls: int, group: str) -> None:
    for _ in range(calls):
        torch.ops._c10d_functional.all_reduce_(tensor, "sum", group)


def _microseconds(library: ctypes.PyDLL, tensor: torch.Tensor, group: str, beside: str) -> float:
    """Returns the time of a call of a thread, beside this one."""
    recording_device.clear()
    library.fakeNcclClearCalls()
    caller = threading.Thread(target=_many, args=(tensor, _CALLS, group))
    caller.start()
    start, first, calls = None, 0, 0
    while (calls := library.fakeNcclCallCount()) < _CALLS:
        if start is None and calls >= _FIRST:
            start, first = time.perf_counter(), calls
        _BESIDE[beside]()
    end = time.perf_counter()
    caller.join()
    torch.ops._c10d_functional.wait_tensor(tensor)
    if start is None:
        raise RuntimeError(
            f"expected to see call {_FIRST} before call {_CALLS}, got no look at them in between"
        )
    return (end - start) / (calls - first) * 1e6


def main() -> None:
    """Measures and prints, and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    device_ranks.prepare()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "fastcoll", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
        )
        group = dist.group.WORLD.group_name
        tensor = torch.ones(1024, device=device_ranks.DEVICE)
        library = ctypes.PyDLL(str(device_ranks.build_stand_in()))
        for _ in range(2):  # TorchScript compiles a function at its second call
            _many(tensor, 50, group)
        torch.ops._c10d_functional.wait_tensor(tensor)
        times: dict[str, list[float]] = {beside: [] for beside in _BESIDE}
        for _ in range(options.rounds):
            for beside, found in times.items():
                found.append(_microseconds(library, tensor, group, beside))
        dist.destroy_process_group()
    medians = {beside: statistics.median(found) for beside, found in times.items()}
    for beside, median in medians.items():
        print(f"{beside:8} {median:6.1f} us a call, {median / medians['asleep']:.2f}x")
    if options.json is not None:
        record = {
            **describe_run(f"python tests/device/call_times.py --rounds {options.rounds}"),
            "calls": _CALLS,
            "rounds": options.rounds,
            "unit": "microseconds a call",
            "cases": [{"beside": beside, "times": found} for beside, found in times.items()],
        }
        write_record(options.json, record)


if __name__ == "__main__":
    main()
