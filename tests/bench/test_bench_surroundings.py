"""The benchmark of what surrounds the collectives of a step, as far as it goes without a GPU."""

import contextlib
import copy
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import recording_device
import torch
import torch.distributed as dist
from world import Worlds, here

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

import peer_memory

from fastcoll.bench import (
    gradients,
    step_clock,
    step_measurement,
    surroundings,
    surroundings_report,
    tables,
)
from fastcoll.bench.gradients import gpt2_medium, resnet50
from fastcoll.bench.kernel_cases import bucketed
from fastcoll.bench.record import read_record, write_record
from fastcoll.bench.step_clock import Observed, observed_in
from fastcoll.bench.step_measurement import Settings
from fastcoll.bench.step_paths import Groups, blocks_of, in_lists

SHAPES = [(40, 30), (7,), (300,), (1,), (64, 8), (5,), (9, 3), (2000,)]
DEVICE = peer_memory.DEVICE


@pytest.fixture(scope="module")
def peer_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Ranks with the recording device on which kernels are interpreted."""
    recording_device.build()
    worlds = Worlds(tmp_path_factory.mktemp("surroundings"), prepare=peer_memory.prepare)
    yield worlds
    worlds.close()


class RecordingClock:
    """Each launch that the recording device has seen counts as a kernel of a microsecond."""

    def synchronize(self) -> None:
        torch.recording.synchronize()

    def occupy(self, microseconds: float) -> None:
        assert microseconds > 0

    def mark(self) -> int:
        return time.perf_counter_ns()

    def between(self, begin: int, end: int) -> float:
        return (end - begin) / 1e3

    def observe(self, step, steps: int) -> Observed:
        recording_device.clear()
        for _ in range(steps):
            step()
        events = []
        for entry in recording_device.log("launch"):
            if entry.what == "allReduce" and not entry.touches[0].write:
                continue  # what it reads is reported apart from what it writes
            what = {"allReduce": "ncclDevKernel_AllReduce"}.get(entry.what, entry.what)
            events += [
                {"ph": "X", "cat": "kernel", "name": what, "dur": 1.0},
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 5.0},
            ]
        return observed_in(events, steps)


@contextlib.contextmanager
def groups() -> Iterator[Groups]:
    made = []
    for algorithm in ("auto", "auto", "nccl"):
        os.environ["FASTCOLL_ALGO"] = algorithm
        group = dist.new_group()
        dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
        made.append(group)
    del os.environ["FASTCOLL_ALGO"]
    yield Groups(*made)


def measured(only):
    """All of the benchmark but CUDA's events and profiler."""
    del os.environ[
        "FASTCOLL_ERROR_HANDLING"
    ]  # the tests' own; the record shows the user's variables
    gradients.MODELS["small"] = lambda: SHAPES
    path = here().scratch / "out" / "record.jsonl"
    surroundings.Settings = functools.partial(Settings, warmup=2, steps=1, traced=1)
    given = ["small", "--rounds", "2", "--copy-size", "4096", "--json", str(path)]
    given += [f"--only={name}" for name in only]
    options = surroundings._parse(given)
    recording_device.clear()
    with recording_device.judged_at_reuse(), recording_device.no_violations():
        status = surroundings._measure(
            options, given, torch.device(DEVICE), RecordingClock(), groups()
        )
    return status, read_record(path)


@pytest.mark.full
def test_every_way_is_measured(peer_world):
    ((status, record),) = peer_world(1).run(measured, (), fresh=True)
    (model,) = record["cases"]
    assert not model["failed"], "\n".join(model["failed"].values())
    assert status == 0
    rows = {row["name"]: row for row in model["paths"]}
    assert len(rows) == 24 + 2 * ("stock DDP, batched_grad_copy" in rows)
    assert all(row["time"]["host"]["count"] == 2 for row in rows.values())
    added = {name: row["observed_added"] for name, row in rows.items()}
    tensors = len(SHAPES)
    # One multiplication in and one copy out for each tensor, and one all-reduce for each bucket.
    assert added["stock DDP"]["kernels"] == 2 * tensors
    assert added["stock DDP, bucket views"]["kernels"] == tensors
    assert added["stock DDP"]["collective_kernels"] == 1
    kept = added["fused hook, bucket views, gradients kept"]
    assert (kept["kernels"], kept["collective_kernels"]) == (0, 1)
    # A list goes through one bucket between ranks, and tensor by tensor at one.
    assert added["GradientSynchronizer"]["collective_kernels"] == 1
    assert added["GradientSynchronizer, as at one rank"]["collective_kernels"] == tensors
    assert added["GradientSynchronizer, as at one rank"]["kernels"] == 0
    assert added["all_reduce_coalesced of all"]["collective_kernels"] == 1
    assert added["GradientSynchronizer, bf16 wire"]["collective_kernels"] == 0
    if "all_gather_single" in dir(dist):  # torch 2.13: FSDP2 calls nothing at one rank
        assert added["FSDP2, fastcoll.fsdp.apply"]["collective_kernels"] == 0
    assert rows["stock DDP"]["bytes"] == 4 * model["size"]
    assert rows["GradientSynchronizer"]["passes"] == 4
    assert record["one_rank"].startswith("At one rank a collective has nothing to move")
    assert_table(record)


def assert_table(record):
    """The page makes a table of it."""
    record["machine"]["gpus"] = ["a GPU"]
    for row in record["cases"][0]["paths"]:
        row.pop("of_stock_host", None)  # there or not, by the noise of so few steps
        if row["name"] == "fused hook":
            row["of_stock_host"] = 0.25
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tables, "_RESULTS", Path(folder)),
    ):
        assert tables._surroundings() == ["Never run on a GPU ([status.md](status.md))."]
        write_record(Path(folder) / "surroundings_cuda_1rank.jsonl", record)
        lines = tables._surroundings()
    rows = {cells[2].strip(): cells for cells in (line.split("|") for line in lines) if cells[1:]}
    assert rows["stock DDP"][5].strip() == "-" and rows["stock DDP"][8].strip() == "4 S"
    assert rows["fused hook"][5].strip() == "0.25"
    assert rows["FSDP2"][8].strip() == "-"
    assert "no data parallelism" not in rows
    assert lines[-2].split(" ", 1)[1].startswith("python -m fastcoll.bench.surroundings small")


def broken():
    """A way whose gradients are wrong, and one that raises."""
    from fastcoll.bench import step_paths

    def raising(*_, **__):
        raise RuntimeError("no such way here")

    def halving(model, group):
        def after():
            for parameter in model.parameters():
                parameter.grad /= 2

        return step_paths.Attached(model, after)

    step_paths.STOCK_WAYS["bf16_compress_hook, bucket views"] = raising
    step_paths.synchronized = halving
    return measured(("bf16_compress_hook, bucket", "GradientSynchronizer, as"))


@pytest.mark.full
def test_what_fails_is_told_and_the_rest_is_measured(peer_world):
    ((status, record),) = peer_world(1).run(broken, fresh=True)
    (model,) = record["cases"]
    failed = model["failed"]
    assert status == 1 and list(failed) == [
        "bf16_compress_hook, bucket views",
        "GradientSynchronizer, as at one rank",
    ]
    assert "no such way here" in failed["bf16_compress_hook, bucket views"]
    wrong = sum(map(torch.Size.numel, map(torch.Size, SHAPES)))
    assert f"{wrong} elements of the gradients are wrong" in failed[list(failed)[1]]
    assert [row["name"] for row in model["paths"]] == [
        "no data parallelism",
        "no data parallelism, gradients kept",
        "no data parallelism, in blocks",
    ]


TRACE = [
    {"ph": "M", "name": "process_name"},
    {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>", "dur": 6.0},
    {"cat": "kernel", "name": "void (anonymous namespace)::oneRankReduce<X>(void*)", "dur": 3.0},
    {"cat": "kernel", "name": "bucket_kernel", "dur": 1.0},
    {"cat": "kernel", "name": "flatten_kernel", "dur": 2.0},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 4.0, "args": {"bytes": 640}},
    {"cat": "gpu_memset", "name": "Memset", "dur": 1.0, "args": {"bytes": 64}},
    {"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "dur": 99.0},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "dur": 5.0},
    {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "dur": 5.0},
    {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "dur": 5.0},
    {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "dur": 5.0},
    {"cat": "cuda_runtime", "name": "cudaEventRecord", "dur": 5.0},
]


def test_a_trace_is_read():
    found = observed_in(TRACE, 2)
    assert found == Observed(1, 4.0, 1, 2.0, 1, 2.5, 352, 2)
    assert found.less(Observed(1, 1.0)).around_microseconds == 5.5
    with pytest.raises(ValueError, match="expected kernels in the profiler's trace, got none"):
        observed_in(TRACE[:1] + TRACE[8:], 1)


def test_the_clock_asks_cuda(monkeypatch):
    """As far as it can be told apart from a GPU: what is called, and in which order."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, end):
            assert end is not self
            return 0.25

    class Profile:
        def __init__(self, activities):
            assert [one.name for one in activities] == ["CUDA"]

        def __enter__(self):
            calls.append("profile")
            return self

        def __exit__(self, *_):
            calls.append("end")

        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": TRACE}))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(cycles))
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(step_clock.torch, "zeros", lambda *_, **__: calls.append("zeros"))
    clock = step_clock.CudaClock()
    clock.occupy(3.0)
    assert clock.between(clock.mark(), clock.mark()) == 250.0
    assert calls == [6000, "record", "record", "synchronize"]
    calls.clear()
    assert clock.observe(lambda: calls.append("step"), 2).kernels == 1
    traced = ["wait", "profile", "step", "step", "wait", "end"]
    assert calls == ["wait", "profile", "zeros", "wait", "end", *traced]
    calls.clear()
    clock.observe(lambda: calls.append("step"), 2)
    assert calls == traced


def row_of(name: str, host: float, device: float) -> dict:
    """Of a base of 100 us, and times that spread by 4 us either way."""
    added = {"host": host, "device": device}
    time = {kind: {"lower": 96 + more, "upper": 104 + more} for kind, more in added.items()}
    return {"name": name, "base": "alone", "added": added, "time": time}


def test_rows_are_compared_with_stock_ddp():
    rows = [row_of("alone", 0, 0), row_of("stock DDP", 30.0, 7.0), row_of("ours", 9.0, 5.0)]
    surroundings_report.add_ratios(rows)
    assert rows[0] == row_of("alone", 0, 0)
    assert (rows[1]["of_stock_host"], rows[1]["meets_host_target"]) == (1.0, False)
    assert (rows[2]["of_stock_host"], rows[2]["meets_host_target"]) == (0.3, True)
    assert not any("of_stock_device" in row for row in rows)  # below the noise
    rows = [row_of("alone", 0, 0), row_of("stock DDP", 0.0, 20.0), row_of("ours", 9.0, 50.0)]
    surroundings_report.add_ratios(rows)
    assert rows[2]["of_stock_device"] == 2.5 and "meets_host_target" not in rows[2]
    for lacking in (rows[1:], [rows[0], rows[2]]):
        before = copy.deepcopy(lacking)
        surroundings_report.add_ratios(lacking)
        assert lacking == before


def test_which_lists_are_copied():
    """Lists of more than a mebibyte a tensor stay where they are: most of gpt2-medium's, and half of resnet50's."""
    assert 1 < in_lists(bucketed(resnet50())) < 2
    assert in_lists(bucketed(gpt2_medium())) < 1
    assert in_lists([resnet50()]) == 4 and in_lists([gpt2_medium()]) == 0
    assert in_lists([[(5,)] * 4, [(20,)]]) == 2


def test_blocks_are_the_model():
    blocks = blocks_of(gpt2_medium(), 25 << 20)
    assert [shape for block in blocks for shape in block] == gpt2_medium()
    sizes = [sum(torch.Size(shape).numel() * 4 for shape in block) for block in blocks]
    assert all(size >= 25 << 20 for size in sizes[:-1]) and len(blocks) > 20


def test_no_round_begins_when_time_is_up(monkeypatch):
    turns = []
    measured = step_measurement.Measurement(
        torch.device("cpu"), SimpleNamespace(), Settings(rounds=5, seconds=0.0)
    )
    measured.candidates = {"first": 1, "second": 2}
    monkeypatch.setattr(measured, "_turn", turns.append)
    measured.time()
    assert turns == [1, 2]


@pytest.mark.parametrize(
    ("given", "text"),
    [(["resnet51"], "expected models of resnet50"), (["--rounds", "0"], "at least one round")],
)
def test_wrong_arguments_are_refused(given, text, capsys):
    with pytest.raises(SystemExit) as caught:
        surroundings.main(given)
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert surroundings.main([]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err
