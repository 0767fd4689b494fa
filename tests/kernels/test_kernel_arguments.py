"""Bad arguments are refused before anything is launched, with what was expected and what came."""

import pytest
import torch

from fastcoll.buckets import BucketLayout
from fastcoll.kernels import Flatten, Reduce, Statistics, Unflatten

CPU = torch.device("cpu")
LAYOUT = BucketLayout([10, 20])


def flatten_plan() -> Flatten:
    return Flatten(LAYOUT, torch.float32, torch.float32, CPU)


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(10), torch.zeros(20)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [torch.zeros(10)], ValueError, "2 tensors"),
        (
            lambda: [torch.zeros(10), torch.zeros(21)],
            ValueError,
            r"tensors\[1\].*elements",
        ),
        (
            lambda: [torch.zeros(10), torch.zeros(20).half()],
            TypeError,
            r"tensors\[1\].*float16",
        ),
        (
            lambda: [torch.zeros(20)[::2], torch.zeros(20)],
            ValueError,
            r"tensors\[0\].*contiguous",
        ),
        (
            lambda: [torch.zeros(10, device="meta"), torch.zeros(20)],
            ValueError,
            r"tensors\[0\].*meta",
        ),
    ],
)
def test_lists_that_do_not_fit(make, error, message) -> None:
    bucket = LAYOUT.new_bucket(torch.float32, CPU)
    with pytest.raises(error, match=message):
        flatten_plan()(make(), bucket)
    with pytest.raises(error, match=message):
        Unflatten(LAYOUT, torch.float32, torch.float32, CPU)(bucket, make())


@pytest.mark.parametrize(
    ("bucket", "error", "message"),
    [
        (torch.zeros(29), ValueError, "bucket"),
        (torch.zeros(60)[::2], ValueError, "bucket"),
        (torch.zeros(30).half(), TypeError, "bucket"),
        (torch.zeros(30, device="meta"), ValueError, "bucket"),
    ],
)
def test_buckets_that_do_not_fit(bucket, error, message) -> None:
    with pytest.raises(error, match=message):
        flatten_plan()(tensors(), bucket)


def test_memory_that_overlaps() -> None:
    memory = torch.zeros(60)
    with pytest.raises(ValueError, match="tensors"):
        flatten_plan()([memory[:10], memory[11:31]], memory[:30])
    plan = Unflatten(LAYOUT, torch.float32, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\]"):
        plan(torch.zeros(30), [memory[:10], memory[9:29]])
    with pytest.raises(ValueError, match="bucket"):
        plan(memory[:30], [torch.zeros(10), memory[9:29]])
    both = Reduce(LAYOUT, 2, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"inputs\[1\]"):
        both([torch.zeros(30), memory[1:31]], memory[:30])


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.ones((), dtype=torch.float64), TypeError, "scale"),
        (torch.ones(2), ValueError, "scale"),
        (torch.ones((), device="meta"), ValueError, "scale"),
    ],
)
def test_scales_that_are_none(scale, error, message) -> None:
    with pytest.raises(error, match=message):
        flatten_plan()(tensors(), LAYOUT.new_bucket(torch.float32, CPU), scale)


def test_statistics_without_room() -> None:
    with pytest.raises(ValueError, match="room for 2 programs"):
        flatten_plan()(tensors(), torch.zeros(30), statistics=Statistics(1, CPU))


def test_dtypes_without_a_kernel() -> None:
    with pytest.raises(TypeError, match="int32"):
        Flatten(LAYOUT, torch.int32, torch.int32, CPU)
    with pytest.raises(TypeError, match="float64 -> float32"):
        Flatten(LAYOUT, torch.float64, torch.float32, CPU)
    with pytest.raises(TypeError, match="float64"):
        Reduce(LAYOUT, 2, torch.float64, CPU)
    with pytest.raises(ValueError, match="op"):
        Reduce(LAYOUT, 2, torch.float32, CPU, "MAX")
    with pytest.raises(ValueError, match="inputs"):
        Reduce(LAYOUT, 0, torch.float32, CPU)
    plan = Reduce(LAYOUT, 2, torch.float32, CPU)
    with pytest.raises(ValueError, match="inputs"):
        plan([torch.zeros(30)], torch.zeros(30))


def test_devices_without_a_kernel() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        Flatten(LAYOUT, torch.float32, torch.float32, "meta")
