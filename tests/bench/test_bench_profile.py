"""What ``ddp --profile`` tells of a step: on the CPU as it is, on a GPU from events like the profiler's."""

from types import SimpleNamespace

import pytest
from altered_rank import SMALL
from bench_ranks import FEW, run_on
from torch.autograd import DeviceType

from fastcoll.bench.derived import StepProfile, added_by_profile
from fastcoll.bench.step_profile import profiled

DDP = ("ddp", "small", "--profile", *FEW, "--backend")


def test_launches_of_each_way_on_the_cpu(world):
    ended = run_on(world, 2, *DDP, "gloo,fastcoll,fastcoll-sync", module="altered_rank")
    (row,) = ended.cases
    assert row["alone"]["profile"]["collectives"] == 0
    more = {
        case["backend"]: added_by_profile(row, case)
        for case in row["cases"]
        if case["buckets"] == "default buckets"
    }
    for backend in ("gloo", "fastcoll"):
        assert more[backend].collectives == 1  # of one bucket
        assert more[backend].launches >= 2 * len(SMALL)  # in and out
        assert more[backend].collective_microseconds > 0
    assert more["fastcoll-sync"].launches == 0  # the collective has the gradients themselves
    assert more["fastcoll-sync"].collectives > 0
    assert "# more than without DDP, by torch.profiler" in ended.stdout


def test_a_way_that_fails_is_told_and_the_others_are_measured(world):
    ended = run_on(world, 2, *DDP, "fastcoll,unwrapping", module="altered_rank", status=1)
    (row,) = ended.cases
    assert {case["backend"] for case in row["cases"]} == {"fastcoll"}
    assert set(row["failed"].values()) == {"TypeError: not today"}
    assert "# unwrapping, one bucket failed: TypeError: not today" in ended.stdout


def event(name, microseconds, device=DeviceType.CPU, **more):
    time = SimpleNamespace(elapsed_us=lambda: microseconds)
    given = {"is_async": False, "cpu_children": [], "is_user_annotation": False, **more}
    return SimpleNamespace(name=name, device_type=device, time_range=time, **given)


GPU = [
    event("void at::native::vectorized_elementwise_kernel<4>", 6.0, DeviceType.CUDA),
    event("void (anonymous namespace)::oneRankReduce<X>(void*)", 3.0, DeviceType.CUDA),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5.0, DeviceType.CUDA),
    event("flatten_kernel", 2.0, DeviceType.CUDA),
    event("Memcpy DtoD (Device -> Device)", 4.0, DeviceType.CUDA),
    event("nccl:all_reduce", 99.0, DeviceType.CUDA, is_user_annotation=True),
]
HOST = [
    event("aten::mul", 50.0),
    event("nccl:all_reduce", 50.0, is_async=True),
    event("cudaLaunchKernelExC", 5.0),
    event("cuLaunchKernelEx", 5.0),
    event("cudaGraphLaunch", 5.0),
    event("cudaMemcpyAsync", 5.0),
    event("cudaEventRecord", 5.0),
]


def test_events_of_a_gpu_are_told_apart():
    found = profiled(GPU + HOST, 2, True, 7.0)
    assert found == StepProfile(7.0, 1.5, 6.0, 1.0, 4.0, 2.0)
    alone = {"alone": {"profile": StepProfile(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)._asdict()}}
    more = added_by_profile(alone, {"profile": found._asdict()})
    assert more is not None and more.launch_microseconds == 5.0


def test_without_launches_there_is_no_profile():
    with pytest.raises(ValueError, match="expected launches"):
        profiled(HOST, 1, True, 1.0)
