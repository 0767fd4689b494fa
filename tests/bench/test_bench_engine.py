"""The benchmark of the device engine's host time, as far as it goes without a GPU."""

import pytest
import recording_device
import torch
import torch.distributed as dist

from fastcoll.bench.device_timing import time_on_host
from fastcoll.bench.engine import CASES, call_of, main


def every_case():
    """Its calls are right, and its times are of calls that were made."""
    device = torch.device("recording:0")
    recording_device.clear()
    groups = {"first": dist.new_group(), "second": dist.new_group()}
    with recording_device.no_violations():
        for case in CASES:
            calls = {name: call_of(case, group, device) for name, group in groups.items()}
            before = len(recording_device.log("launch"))
            times = time_on_host(calls, torch.recording.synchronize, rounds=2, batch=3)
            assert set(times) == set(groups)
            assert all(time.count == 2 and time.minimum > 0 for time in times.values())
            made = len(recording_device.log("launch")) - before
            assert made >= 2 * (2 + 2) * 3


@pytest.mark.full
def test_every_case(nccl_world):
    nccl_world(1).run(every_case)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err
