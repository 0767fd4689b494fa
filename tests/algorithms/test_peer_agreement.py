"""Ranks agree on whether they map memory of each other, and on how all-reduces are forced."""

import contextlib
import logging
import os
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from unittest import mock

import peer_memory
import pytest
import torch
import torch.distributed as dist
from device_ranks import called
from on_ranks import on_ranks
from peer_memory import DEVICE, table_of

import fastcoll
from fastcoll import info, tuning
from fastcoll.cuda import consensus, engine, self_test, symmetric
from fastcoll.cuda.mapping_decision import reason_against
from fastcoll.cuda.thresholds import Thresholds

SET_UP = "the set-up of the kernels has not ended after"


def record(**changes):
    limits = Thresholds(one_shot_bytes=changes.pop("limit", 8))
    request = {"algorithm": changes.pop("algorithm", "auto"), "thresholds": asdict(limits)}
    given = {"triton": "3.7", "missing": "", "host": "a", "device": "", "request": request}
    given["channels"] = 32
    return {**given, **changes}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([record(), record()], ""),
        ([record(device="gpu 0"), record(device="gpu 1")], ""),
        ([record(), record(host="b"), record(host="b")], "ranks 1, 2 and rank 0 are on different hosts"),
        ([record(device="gpu 0"), record(device="gpu 0")], "ranks 0 and 1 are on one device. Give each rank its own"),
        ([record(missing="torch 1 has none"), record()], "rank 0: torch 1 has none"),
        ([record()] * 33, "there are 33 ranks, and the kernels support at most 32"),
        ([record(algorithm="nccl")] * 2, "FASTCOLL_ALGO is nccl"),
        ([record(limit=0), record()], "no limit of a kernel was measured on these devices. Run `fastcoll tune"),
        ([record(limit=0, algorithm="one_shot")] * 2, ""),
        ([record(), record(channels=0)], "rank 1: other groups of the process use all thread blocks"),
    ],
)  # fmt: skip
def test_the_reason_is_the_same_function_of_all_records_on_all_ranks(records, reason):
    found = reason_against(records)
    assert found == "" if not reason else found.startswith(reason)


@on_ranks(2, world="peer_world")
def test_a_triton_that_does_not_work_on_one_rank():
    """On one rank alone: none has kernels, and NCCL serves."""
    if dist.get_rank() == 1:
        triton, sys.modules["triton"] = sys.modules["triton"], None
    try:
        group = dist.new_group()
        x = torch.ones(30, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.cpu().eq(2).all()
    finally:
        if dist.get_rank() == 1:
            sys.modules["triton"] = triton
    topology = peer_memory.reduces_of(group).region.topology
    assert not topology.kernels and not topology.peers
    assert topology.reason.startswith("rank 1: Triton is not installed")
    with pytest.raises(ValueError, match="all_to_all: the kernels need Triton on all ranks"):
        fastcoll.all_reduce_coalesced([x], group=group, wire_dtype=torch.bfloat16)
    many = [torch.ones(30, device=DEVICE) for _ in range(6)]
    fastcoll.all_reduce_coalesced(many, group=group)
    assert all(tensor.cpu().eq(2).all() for tensor in many)


@pytest.mark.parametrize("works", [True, False])
@on_ranks(3, world="peer_world")
def test_ranks_that_map_nothing_try_kernels_at_the_first_list(works):
    """A program without lists, wires and other options imports no Triton, and compiles nothing."""
    tried = []

    def require(device):
        tried.append(device)
        if not works and dist.get_rank() == 1:
            raise RuntimeError("no compiler in this test")
        self_test.require_lists(device)

    refuses = {"missing"} if dist.get_rank() == 1 else set()
    with (
        peer_memory.MAPPER.changed(refuses=refuses),
        mock.patch.object(symmetric, "require_lists", require),
    ):
        group = dist.new_group()
        x = torch.ones(30, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.cpu().eq(3).all() and not tried
        for _ in range(2):
            many = [torch.ones(30, device=DEVICE) for _ in range(6)]
            fastcoll.all_reduce_coalesced(many, group=group)
            assert all(tensor.cpu().eq(3).all() for tensor in many)
            assert len(tried) == 1
    topology = peer_memory.reduces_of(group).region.topology
    assert topology.kernels == works and not topology.peers
    reason = "nothing is mapped in this test" if works else "RuntimeError: no compiler in this test"
    assert topology.reason == f"rank 1: {reason}"


@contextlib.contextmanager
def broken(change):
    """Kernels that do not work on this rank: what Triton or the device would do is played."""
    from fastcoll.kernels import flatten
    from fastcoll.kernels.staged import two_shot

    over = threading.Event()

    def fails(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    def never(*_):
        over.wait()
        raise RuntimeError("too late for anybody")

    prepare = two_shot.prepare_all_reduce

    def prepared(source, out, peers):
        launch = prepare(source, out, peers)
        return {
            "launch": fails,
            "never": never,
            "bits": lambda: (launch(), out[200:].sub_(2.0)),
        }[change]

    if change == "lists":
        with (
            mock.patch.object(flatten.Flatten, "prepare", fails),
            mock.patch.object(self_test, "_works", set()),
        ):
            yield
    elif change in ("compile", "launch", "never", "bits"):
        patched = fails if change == "compile" else prepared
        with mock.patch.object(two_shot, "prepare_all_reduce", patched):
            try:
                yield
            finally:
                over.set()
    else:
        yield


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("host", "rank 1 and rank 0 are on different hosts"),
        ("device", "ranks 0 and 1 are on one device"),
        ("missing", "rank 1: nothing is mapped in this test"),
        ("atomics", "rank 1: RuntimeError: no atomics in this test"),
        ("allocate", "rank 1: RuntimeError: no memory in this test"),
        ("map", "rank 1: RuntimeError: no mapping in this test"),
        ("hangs", f"rank 1: TimeoutError: {SET_UP} 0.5 s (step mapped)"),
        ("lists", "rank 1: RuntimeError: Failed to find C compiler"),
        ("compile", "rank 1: RuntimeError: Failed to find C compiler"),
        ("launch", "rank 1: RuntimeError: Failed to find C compiler"),
        (
            "bits",
            "rank 1: RuntimeError: the kernel two_shot is wrong on this device: element 200 of 257",
        ),
        ("never", f"rank 1: TimeoutError: {SET_UP} 0.5 s (step works)"),
    ],
)
@on_ranks(3, world="peer_world")
def test_all_ranks_fall_back_together_and_say_why(change, expected):
    """One rank alone cannot: none does, and all can say why."""
    changes = {}
    if change == "device":
        changes["identity"] = "the only GPU"
    elif dist.get_rank() == 1:
        changes = {"on_host": "another host"} if change == "host" else {"refuses": {change}}
    patience = 0.5 if change in ("hangs", "never") and dist.get_rank() == 1 else consensus._PATIENCE
    entries = []
    handler = logging.Handler()
    handler.emit = entries.append
    log = logging.getLogger("fastcoll.cuda")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with (
            peer_memory.MAPPER.changed(**changes),
            mock.patch.object(consensus, "_PATIENCE", patience),
            mock.patch.object(
                symmetric, "_TEST_WAIT", 0.3 if change in ("launch", "never") else 5.0
            ),
            broken(change if dist.get_rank() == 1 else ""),
        ):
            group, before = dist.new_group(), called("allReduce")
            for _ in range(2):
                x = torch.full((100,), 1.0 + dist.get_rank(), device=DEVICE)
                dist.all_reduce(x, group=group)
                assert x.cpu().eq(6).all()
    finally:
        log.removeHandler(handler)
    reduces = peer_memory.reduces_of(group)
    assert called("allReduce") == before + 2
    assert reduces.chosen == "" and reduces.region.peers is None
    said = [entry for entry in entries if "by NCCL alone" in entry.getMessage()]
    assert len(said) == (dist.get_rank() == 0)
    level = logging.INFO if change in ("host", "device", "missing") else logging.WARNING
    assert all(entry.levelno == level for entry in said)
    assert reduces.has_kernels() == (change != "lists")
    told = {each["name"]: each.get("devices") for each in info.groups()}
    reason = reduces.region.topology.reason
    assert reason.startswith(expected)
    assert told[group.group_name] == {0: {"peers": False, "reason": reason}}
    # The default group's ranks still can.
    x = torch.ones(10, device=DEVICE)
    dist.all_reduce(x)
    assert peer_memory.reduces_of().chosen == "one_shot"
    told = {each["name"]: each.get("devices") for each in info.groups()}
    assert told[dist.group.WORLD.group_name] == {0: {"peers": True, "reason": ""}}
    reasons = [None] * 3
    dist.all_gather_object(reasons, reason)
    assert reasons == [reason] * 3


@on_ranks(3, world="peer_world")
def test_a_mapping_that_hangs_is_given_up_before_the_groups_timeout():
    """One rank's mapping hangs; the others still hear that it cannot."""
    changes = {"refuses": {"hangs"}} if dist.get_rank() == 1 else {}
    with peer_memory.MAPPER.changed(**changes):
        group = dist.new_group(timeout=timedelta(seconds=4))
        x = torch.ones(100, device=DEVICE)
        dist.all_reduce(x, group=group)
    assert x.cpu().eq(3).all()
    reason = peer_memory.reduces_of(group).region.topology.reason
    assert reason == f"rank 1: TimeoutError: {SET_UP} 2 s (step mapped)"


@pytest.mark.parametrize("algorithm", ["nccl", "one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks(world="peer_world")
def test_an_algorithm_is_forced_or_refused_by_name(size, algorithm):
    os.environ["FASTCOLL_ALGO"] = algorithm
    group, before = dist.new_group(), called("allReduce")
    ranks = dist.get_world_size()
    x = torch.full((50,), 1.0, device=DEVICE)
    dist.all_reduce(x, group=group)
    assert x.cpu().eq(ranks).all()
    reduces = peer_memory.reduces_of(group)
    assert reduces.chosen == ("" if algorithm == "nccl" else algorithm)
    assert called("allReduce") - before == (algorithm == "nccl" and ranks > 1)
    assert (reduces.region.peers is None) == (algorithm == "nccl")
    # Calls for which there is one way only are none of its business.
    dist.broadcast(x, 0, group=group)
    outputs = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(outputs, x, group=group)
    assert all(output.cpu().eq(ranks).all() for output in outputs)
    if algorithm == "nccl":
        numbers = torch.ones(3, dtype=torch.int64, device=DEVICE)
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [ranks] * 3
        return
    for refused, why in (
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64, device=DEVICE), group=group),
         "the kernels add float32, float16, bfloat16, not int64"),
        (lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=group),
         "the kernels have SUM and AVG, not PREMUL_SUM"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why) as caught:
            refused()
        assert f"rank {dist.get_rank()}/{ranks}" in str(caught.value)
        assert f"expected the requested algorithm {algorithm}" in str(caught.value)
    dist.all_reduce(x, group=group)  # the group is as good as before
    assert x.cpu().eq(ranks * ranks).all()


@on_ranks(2, world="peer_world")
def test_a_forced_algorithm_without_its_memory_is_an_error():
    os.environ["FASTCOLL_ALGO"] = "two_shot"
    with peer_memory.MAPPER.changed(refuses={"missing"}):
        group = dist.new_group()
        x = torch.ones(4, device=DEVICE)
        with pytest.raises(
            ValueError, match="the ranks map no memory of each other: rank 0: nothing is mapped"
        ):
            dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)


@on_ranks(2, world="peer_world", fresh=True)
def test_ranks_with_different_orders_are_told():
    os.environ["FASTCOLL_ALGO"] = "ring" if dist.get_rank() == 1 else "auto"
    group = dist.new_group()
    with pytest.raises(
        dist.DistBackendError,
        match="expected the same FASTCOLL_ALGO on all ranks, got auto on rank 0 and ring on rank 1",
    ):
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group)


@on_ranks(2, world="peer_world", fresh=True)
def test_of_different_tables_that_of_rank_0_counts():
    """Ranks on devices of other names, of which each has a section of its own or an estimate, start too."""
    limits = [dict.fromkeys(asdict(Thresholds()), 7 + rank) for rank in range(2)]
    os.environ["FASTCOLL_TUNING"] = table_of("recording", limits[dist.get_rank()])
    assert tuning.load().device.one_shot_bytes == 7 + dist.get_rank()
    group = dist.new_group()
    dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
    assert peer_memory.reduces_of(group).region.thresholds == Thresholds(**limits[0])


@on_ranks(2, world="peer_world", fresh=True)
def test_a_table_counts_on_the_devices_that_it_names():
    """Which of a host's devices a group is on is known when it makes its region, not when it is made."""
    limits, found = dict.fromkeys(asdict(Thresholds()), 7), []
    for name in ("model 0", "model 1"):
        os.environ["FASTCOLL_TUNING"] = table_of(name, limits)
        group = dist.new_group()
        with mock.patch.object(engine, "device_name", lambda device: f"model {device.index}"):
            dist.all_reduce(torch.ones(4, device=DEVICE), group=group)
        found.append(peer_memory.reduces_of(group).region.thresholds == Thresholds(**limits))
    assert found == [True, False]
