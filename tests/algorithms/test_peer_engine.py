"""All-reduces of device tensors over peer memory, from torch.distributed to the kernels: bits, order, choices.

Ranks are processes over shared memory with interpreted kernels; results are compared with the kernels' oracle.
"""

import threading
import time
import unittest.mock
from datetime import timedelta

import device_calls
import kernel_oracle
import peer_memory
import pytest
import recording_device
import torch
import torch.distributed as dist
from device_calls import inputs_of
from on_ranks import on_ranks
from peer_memory import DEVICE
from suite_rules import full

EACH = [
    (torch.float32, 1, "SUM"),
    (torch.float32, 37, "AVG"),
    (torch.float32, 2100, "SUM"),
    (torch.bfloat16, 1000, "AVG"),
    (torch.float16, 130, "SUM"),
]


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
@pytest.mark.parametrize(
    ("size", "async_op"), [full(2, False, id="2-sync"), pytest.param(3, True, id="3-async")]
)
@on_ranks(world="peer_world")
def test_every_algorithm_gives_the_oracles_bits(size, algorithm, async_op):
    reduces = None
    with recording_device.no_violations():
        for seed, (dtype, count, op) in enumerate(EACH):
            inputs = inputs_of(count, dtype, seed)
            x = inputs[dist.get_rank()].to(DEVICE)
            number = getattr(dist.ReduceOp, op)
            work = device_calls.all_reduce(x, number, async_op=async_op, algorithm=algorithm)
            if async_op:
                work.wait()
            x += 0  # on the caller's stream
            expected = kernel_oracle.all_reduce(inputs, op.lower(), algorithm=algorithm)
            assert torch.equal(x.cpu(), expected), (dtype, count, op)
            reduces = reduces or peer_memory.reduces_of()
            assert reduces.chosen == algorithm
        for wire, count in ((torch.bfloat16, 1100), (torch.float16, 17)):
            inputs = inputs_of(count, torch.float32, count)
            x = inputs[dist.get_rank()].to(DEVICE)
            options = {"algorithm": algorithm, "wire_dtype": wire, "scale": 0.5}
            work = device_calls.all_reduce(x, dist.ReduceOp.AVG, async_op=async_op, **options)
            if async_op:
                work.wait()
            expected = kernel_oracle.all_reduce(inputs, "avg", 0.5, wire, algorithm)
            assert torch.equal(x.cpu(), expected), wire


LIST = (5, 300, 33, 1, 16, 4097)
SHORT = (5, 300, 1, 16, 700)
LIST_ALGORITHMS = ("one_shot", "two_shot", "ring", "nccl", "all_to_all")


def lists_of(dtype, seed, sizes=LIST):
    """What each rank gives to a call of a list."""
    each = [inputs_of(size, dtype, seed + index) for index, size in enumerate(sizes)]
    return [list(tensors) for tensors in zip(*each, strict=True)]


def assert_reduced_lists(tensors, lists, *arguments):
    for tensor, inputs in zip(tensors, zip(*lists, strict=True), strict=True):
        expected = kernel_oracle.all_reduce(inputs, *arguments)
        assert torch.equal(tensor.cpu(), expected), (arguments, tensor[:3].cpu(), expected[:3])


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [
        *((3, algorithm) for algorithm in LIST_ALGORITHMS),
        *(full(2, algorithm) for algorithm in LIST_ALGORITHMS),
        (1, "nccl"),
        (1, "all_to_all"),
    ],
)
@on_ranks(world="peer_world")
def test_lists_are_fused(size, algorithm):
    sizes = SHORT if algorithm == "ring" else LIST
    with recording_device.no_violations():
        for seed, (dtype, wire, how) in enumerate((
            (torch.float32, None, "list"),
            (torch.bfloat16, None, "batch"),
            (torch.float32, torch.bfloat16, "async batch"),
            (torch.float64, None, "list"),
        )):  # fmt: skip
            if algorithm != "nccl" and dtype == torch.float64:
                continue
            if algorithm == "nccl" and wire is not None:
                continue
            lists = lists_of(dtype, 10 * seed, sizes)
            tensors = [tensor.to(DEVICE) for tensor in lists[dist.get_rank()]]
            options = {"algorithm": algorithm, "wire_dtype": wire, "fuse": True}
            if how == "list":
                device_calls.all_reduce(tensors, dist.ReduceOp.AVG, **options)
            else:
                asynchronous = how == "async batch"
                device_calls.together(tensors, dist.ReduceOp.AVG, asynchronous, **options)
            reduces = peer_memory.reduces_of()
            assert reduces.chosen == algorithm
            assert reduces.plans.built
            if algorithm == "ring":
                expected = kernel_oracle.all_reduce(_bucket(lists), "avg", 1.0, wire, "ring")
                assert torch.equal(_bucket([[t.cpu() for t in tensors]])[0], expected)
            elif algorithm == "nccl":
                for tensor, inputs in zip(tensors, zip(*lists, strict=True), strict=True):
                    expected = kernel_oracle.all_reduce(inputs, "avg", 1.0, wire)
                    torch.testing.assert_close(tensor.cpu(), expected)
            else:
                assert_reduced_lists(tensors, lists, "avg", 1.0, wire)


def _bucket(lists):
    """Each list as one, with the gaps that a bucket has."""
    return [
        torch.cat(
            [
                torch.nn.functional.pad(t, (0, -len(t) % 16 if at + 1 < len(ts) else 0))
                for at, t in enumerate(ts)
            ]
        )
        for ts in lists
    ]


@pytest.mark.parametrize("size", [1, full(2), 3, full(8)])
@on_ranks(world="peer_world")
def test_a_sum_over_nccl_with_one_rounding(size):
    with peer_memory.MAPPER.changed(refuses={"missing"}):  # it needs no memory of the peers
        group = dist.new_group()
        dist.all_reduce(torch.ones(3, device=DEVICE), group=group)
    reduces = peer_memory.reduces_of(group)
    launches = set()
    for seed, (dtype, wire, count) in enumerate(
        (d, w, c) for c in (1, 16, 17, 48 * 8, 5000) for d, w in (
            (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
            (torch.bfloat16, None), (torch.float16, None))
    ):  # fmt: skip
        inputs = inputs_of(count, dtype, seed)
        scale = (1.0, 0.3)[(seed + seed // 4) % 2]
        x = inputs[dist.get_rank()].to(DEVICE)
        options = {"algorithm": "all_to_all", "wire_dtype": wire, "scale": scale}
        device_calls.all_reduce(x, dist.ReduceOp.AVG, group, async_op=True, **options).wait()
        expected = kernel_oracle.all_reduce(inputs, "avg", scale, wire)
        assert torch.equal(x.cpu(), expected), (dtype, wire, count)
        launches |= {plan.launches for plan in reduces.plans.values()}
    assert size != 1 or launches == {0, 2, 3, 5}


@on_ranks(2, world="peer_world", fresh=True)
def test_a_timeout_that_is_set_later_counts_on_the_device_too():
    from fastcoll.cuda.engine import engine_of

    x = torch.ones(40, device=DEVICE)
    dist.all_reduce(x)
    reduces = peer_memory.reduces_of()
    buffers = reduces.region.peers.buffers
    before, built = buffers.seconds, reduces.plans.built
    dist.group.WORLD.set_timeout(timedelta(seconds=17))
    for _ in range(2):
        dist.all_reduce(x)
    assert x.cpu().eq(8).all()
    assert reduces.plans.built == built + 1
    assert buffers.seconds == 2 * 17 != before
    assert engine_of(dist.group.WORLD.group_name).timeout == timedelta(seconds=17)


@on_ranks(2, world="peer_world", fresh=True)
def test_code_is_made_outside_the_order_of_calls_and_before_their_time_begins():
    """The code of a call's kernel takes long to make; a call of another thread goes on meanwhile."""
    from fastcoll.cuda.algorithms import ALGORITHMS

    dist.all_reduce(torch.ones(4, device=DEVICE))
    other_done, compiling, made = threading.Event(), threading.Event(), []
    one_shot = ALGORITHMS["one_shot"]

    def slow(call, pieces, context):
        if call.dtype == torch.float16:
            made.append(threading.current_thread().name)
            if len(made) == 1:
                compiling.set()
                assert other_done.wait(30)
                time.sleep(3)  # longer than the group's timeout
        return one_shot.prepare(call, pieces, context)

    x, y = torch.full((4,), 2.0, device=DEVICE, dtype=torch.float16), torch.ones(4, device=DEVICE)
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    with unittest.mock.patch.dict(ALGORITHMS, one_shot=one_shot._replace(prepare=slow)):
        first = threading.Thread(target=dist.all_reduce, args=(x,))
        first.start()
        assert compiling.wait(30)
        dist.broadcast(y, 0)
        assert y.cpu().eq(1).all()
        other_done.set()
        first.join()
        dist.all_reduce(x)
    assert x.cpu().eq(2 * dist.get_world_size() ** 2).all() and len(made) == 2
