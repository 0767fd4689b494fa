"""Accesses that are no tensor's: of workspaces, tables of addresses, and this rank's region. Each order is needed."""

import os
from unittest import mock

import peer_memory
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from peer_memory import DEVICE

import fastcoll
from fastcoll.cuda.algorithms import launches
from fastcoll.cuda.all_reduce import AllReduces

pytestmark = on_ranks(2, world="peer_world", fresh=True)


def two_streams(reduce):
    """Two calls on the caller's stream and the group's, of tensors that have nothing in common.

    The first one does not end before the second one is made: a host that sees its end has ordered them.
    """
    reduce(False)
    recording_device.clear()
    from fastcoll.kernels import _launch

    interpret = _launch._interpret

    def without_end(*arguments):
        interpret(*arguments)
        recording_device.hold(torch.accelerator.current_stream(DEVICE))

    with mock.patch.object(_launch, "_interpret", without_end):
        work = reduce(True)
    reduce(False)
    work.wait()
    found = recording_device.violations()
    recording_device.clear()
    return found


def lists(**options):
    def reduce(async_op):
        tensors = [torch.ones(20, device=DEVICE) for _ in range(6)]
        return fastcoll.all_reduce_coalesced(tensors, async_op=async_op, **options)

    return reduce


def singles(async_op):
    return dist.all_reduce(torch.ones(500, device=DEVICE), async_op=async_op)


def sides(found):
    return {(violation.kind, violation.first.what, violation.second.what) for violation in found}


def test_launches_follow():
    """The mutant `kernels_of_two_streams_do_not_follow` fails here."""
    assert not two_streams(singles) and not two_streams(lists())


def test_tables_of_another_stream():
    tables = AllReduces.tables

    def elsewhere(self, *arguments):
        with torch.Stream(DEVICE):
            return tables(self, *arguments)

    assert not two_streams(lists())
    with mock.patch.object(AllReduces, "tables", elsewhere):
        found = sides(two_streams(lists()))
    assert ("race", "aten::copy_", "flatten_kernel") in found, found


def test_one_workspace_for_all_streams():
    os.environ["FASTCOLL_ALGO"] = "nccl"
    workspace = AllReduces._workspace
    assert not two_streams(lists(wire_dtype=torch.bfloat16))
    kept = []

    def one(self, size, stream, capture):
        kept.append(workspace(self, size, 0, capture))
        return kept[-1]

    with mock.patch.object(AllReduces, "_workspace", one):
        peer_memory.reduces_of().plans.clear()
        found = sides(two_streams(lists(wire_dtype=torch.bfloat16)))
    assert any(second == "flatten_kernel" for _, _, second in found), found


def test_tables_of_a_layout_outlive_their_readers():
    """More lists than layouts are kept: tables of one that is dropped are freed behind the kernels that read them."""
    launches.layout_of.cache_clear()
    with recording_device.no_violations():
        for count in range(1, 9):
            tensors = [torch.ones(count, device=DEVICE) for _ in range(6)]
            work = fastcoll.all_reduce_coalesced(tensors, async_op=True)
            peer_memory.reduces_of().plans.clear()
            launches.layout_of.cache_clear()
            launches._copier.cache_clear()
            work.wait()
