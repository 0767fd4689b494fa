"""The benchmark of the device engine's host time, as far as it goes without a GPU."""

import subprocess
import sys

import pytest
import recording_device
import torch
import torch.distributed as dist

from fastcoll.bench.engine import CASES, bind, measure_host


def every_case():
    """Its calls are right, and its times are of calls that were made."""
    device = torch.device("recording:0")
    recording_device.clear()
    groups = {"first": dist.new_group(), "second": dist.new_group()}
    with recording_device.no_violations():
        for case in CASES:
            calls = {name: bind(case, group, device) for name, group in groups.items()}
            before = len(recording_device.log("launch"))
            times = measure_host(calls, torch.recording.synchronize, rounds=2, batch=3)
            assert set(times) == set(groups)
            assert all(time.count == 2 and time.minimum > 0 for time in times.values())
            made = len(recording_device.log("launch")) - before
            assert made >= 2 * (2 + 2) * 3


def test_every_case(nccl_world):
    nccl_world(1).run(every_case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    ended = subprocess.run(
        [sys.executable, "-m", "fastcoll.bench.engine"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "finds no CUDA device" in ended.stderr
