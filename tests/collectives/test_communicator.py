"""fastcoll.communicator: its arguments, its refusals, and its waits. test_collectives.py compares all its results.

Faults of its calls are in tests/faults, beside those of torch's.
"""

import functools
import os
import threading
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo, shared_bytes, wait_all
from on_ranks import on_ranks
from own_threads import thread_names

import fastcoll
import fastcoll.trace

pytestmark = [beyond_gloo("fastcoll's communicator"), *on_ranks(2)]


# --- arguments -----------------------------------------------------------------------------------


@on_ranks(3)
def test_rank_and_size_are_those_of_the_group():
    group = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="got a group without this rank"):
            fastcoll.communicator(group)
        return
    comm = fastcoll.communicator(group)
    assert (comm.rank, comm.size) == (dist.get_rank(group), 2)
    tensor = torch.full((3,), float(dist.get_rank()))
    comm.broadcast(tensor, src=1)
    assert tensor.tolist() == [float(dist.get_global_rank(group, 1))] * 3


class Array:
    """An array of another library, which torch knows by DLPack alone."""

    def __init__(self, values: list[float]) -> None:
        self.memory = torch.tensor(values)

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


def test_arrays_share_their_memory():
    comm = fastcoll.communicator()
    mine = dist.get_rank() + 1.0
    array = np.full((2, 3), mine)
    comm.all_reduce(array, dist.ReduceOp.MAX)
    assert array.tolist() == [[2.0] * 3] * 2
    strided = np.full((4, 2), mine, dtype=np.float32)
    plan = comm.all_reduce_plan(strided[:, 1])
    plan()
    assert strided.tolist() == [[mine, 3.0]] * 4
    other = Array([mine, 0.0])
    comm.all_reduce(other)
    assert other.memory.tolist() == [3.0, 0.0]
    sparse = torch.ones(3).to_sparse()
    comm.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [2.0] * 3
    gathered = np.zeros(4)
    comm.all_gather(gathered, np.full(2, mine))
    assert gathered.tolist() == [1.0, 1.0, 2.0, 2.0]


# fmt: off
WRONG = {
    "missing": (lambda c: c.all_reduce(), TypeError, "argument 'tensor' is missing"),
    "too many": (lambda c: c.barrier(1), TypeError, "0 arguments at most, got 1"),
    "unknown": (lambda c: c.all_reduce(torch.ones(1), opp=1), TypeError, "unknown argument 'opp'"),
    "twice": (lambda c: c.all_reduce(torch.ones(1), tensor=1), TypeError, "two values"),
    "no tensor": (lambda c: c.all_reduce(3), TypeError, "got int"),
    "read-only": (lambda c: c.all_reduce(np.frombuffer(b"1234", dtype=np.float32)), TypeError, "read-only"),
    "strings": (lambda c: c.all_reduce(np.array(["a"])), TypeError, "torch cannot share"),
    "operation": (lambda c: c.all_reduce(torch.ones(1), "sum"), TypeError,
                  "an operation of torch.distributed.ReduceOp for 'op', got str 'sum'"),
    "no rank": (lambda c: c.broadcast(torch.ones(1), "0"), TypeError, "an integer of 32 bits for 'src', got str '0'"),
    "long rank": (lambda c: c.broadcast(torch.ones(1), 1 << 40), TypeError, "for 'src', got int"),
    "splits": (lambda c: c.all_to_all(torch.ones(2), torch.ones(2), 7), TypeError,
               "a list of integers for 'output_splits', got int 7"),
    "no backend": (lambda c: type(c)(3), TypeError, "expected a backend of fastcoll, got int"),
    "no operation": (lambda c: c.all_reduce(torch.ones(1), None), TypeError, "'op', got NoneType"),
    "source": (lambda c: c.sendrecv(torch.ones(1), 1 - c.rank, torch.ones(1), 9), ValueError,
               "source rank from 0 to 1, got 9"),
    "itself": (lambda c: c.sendrecv(torch.ones(1), 1 - c.rank, torch.ones(1), c.rank), ValueError, "another rank"),
    "root": (lambda c: c.broadcast(torch.ones(1), 9), ValueError, "root rank from 0 to 1, got 9"),
    "root of an object": (lambda c: c.broadcast_object(1, 2), ValueError, "root rank from 0 to 1, got 2"),
    "peer": (lambda c: c.send(torch.ones(1), 9), ValueError, "from 0 to 1, got 9"),
    "sizes": (lambda c: c.all_gather(torch.ones(5), torch.ones(2)), ValueError, "2 x 2 elements"),
    "one of each": (lambda c: c.all_to_all([torch.ones(1)] * 2, torch.ones(2)), TypeError, "got one of each"),
    "dtypes": (lambda c: c.all_gather(torch.ones(4, dtype=torch.int), torch.ones(2)), TypeError, "float32 and int32"),
    "overlap": (lambda c: c.all_reduce(torch.ones(1).expand(4)), ValueError, "overlap"),
    "no part": (lambda c: c.scatter(torch.ones(2), None, c.rank), ValueError, "undefined"),
    "no output": (lambda c: c.all_gather(None, torch.ones(2)), TypeError, "got NoneType"),
    "plan of a sparse tensor": (lambda c: c.all_reduce_plan(torch.ones(3).to_sparse()), ValueError, "a dense tensor"),
    "argument of a plan": (lambda c: c.barrier_plan()(1), TypeError, "expected no arguments"),
    "a plan of nothing": (lambda c: type(c.barrier_plan())(), TypeError, "cannot create"),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_sent(name):
    call, kind, text = WRONG[name]
    comm = fastcoll.communicator()
    with pytest.raises(kind, match=text):
        call(comm)
    tensor = torch.full((2,), 1.0)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    other, tensor[0] = torch.empty(2), comm.rank
    comm.sendrecv(tensor, 1 - comm.rank, other, 1 - comm.rank)
    assert other.tolist() == [1.0 - comm.rank, 2.0]


def test_calls_mix_with_torchs():
    comm = fastcoll.communicator()
    tensors = [torch.full((n,), 1.0) for n in (1, 5000, 1, 300_000)]
    plan = comm.all_reduce_plan(tensors[3])
    works = [dist.all_reduce(tensors[0], async_op=True), dist.all_reduce(tensors[1], async_op=True)]
    comm.all_reduce(tensors[2])
    plan()
    wait_all(works)
    assert all(torch.all(tensor == 2.0) for tensor in tensors)


def send_or_recv(comm, peer: int):
    call = comm.recv if comm.rank == 0 else comm.send
    return functools.partial(call, torch.ones(1), peer)


CALLS = {
    "barrier": lambda comm, _: comm.barrier,
    "barrier_plan": lambda comm, _: comm.barrier_plan(),
    "all_reduce": lambda comm, _: functools.partial(comm.all_reduce, torch.ones(1)),
    "all_reduce_plan": lambda comm, _: comm.all_reduce_plan(torch.ones(1)),
    "long_all_reduce": lambda comm, _: functools.partial(comm.all_reduce, torch.ones(1 << 20)),
    "sendrecv": lambda comm, peer: comm.sendrecv_plan(torch.ones(1), peer, torch.ones(1), peer),
    "recv": send_or_recv,
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_while_a_call_waits(name, first):
    # A call frees the GIL when it waits. Rank 1 waits for a thread of rank 0 before it calls.
    comm = fastcoll.communicator()
    call = CALLS[name](comm, 1 - comm.rank)
    if not first:
        call()
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == 0:
        thread = threading.Timer(0.05, lambda: store.set(f"called {name} {first}", ""))
        thread.start()
        call()
        thread.join()
    else:
        store.wait([f"called {name} {first}"])
        call()


def test_other_threads_run_after_a_callback_within_a_call():
    # The callback of a work may run within a call of the communicator, and calls fastcoll itself.
    comm = fastcoll.communicator()
    store = dist.distributed_c10d._get_default_store()
    first, second, answer = torch.zeros(1), torch.zeros(1), torch.ones(1)
    for turn in range(20):
        if comm.rank == 0:
            work = dist.irecv(first, 1)
            done = work.get_future().then(lambda _: dist.isend(answer, 1, tag=9))
            thread = threading.Timer(0.01, lambda turn=turn: store.set(f"turn {turn}", ""))
            thread.start()
            comm.recv(second, 1)
            done.wait()
            thread.join()
        else:
            comm.send(first, 0)
            store.wait([f"turn {turn}"])
            comm.send(second, 0)
            comm.recv(answer, 0, tag=9)


def test_the_profiler_and_the_trace_see_the_calls():
    comm = fastcoll.communicator()
    tensor = torch.ones(4)
    plan = comm.all_reduce_plan(tensor)
    with torch.profiler.profile() as profile:
        plan()
        comm.all_reduce(tensor)
    names = [event.name for event in profile.events()]
    assert names.count("fastcoll:all_reduce") == 2, names
    assert tensor.tolist() == [4.0] * 4
    plan()
    records = fastcoll.trace.records()[-3:]
    assert [record["state"] for record in records] == ["completed"] * 3
    first = records[0]["collective_seq_id"]
    assert [record["collective_seq_id"] for record in records] == [first, first + 1, first + 2]
    assert {record["profiling_name"] for record in records} == {records[0]["profiling_name"]}


def test_the_version_counter_moves_as_with_torchs_calls():
    comm = fastcoll.communicator()
    outputs = [torch.empty(4), torch.empty(4), torch.empty(4)]
    plan = comm.all_gather_plan(outputs[2], torch.ones(2))
    versions = [output._version for output in outputs]
    dist.all_gather_into_tensor(outputs[0], torch.ones(2))
    comm.all_gather(outputs[1], torch.ones(2))
    plan()
    moved = [output._version - version for output, version in zip(outputs, versions, strict=True)]
    assert moved == [1, 1, 1]


@pytest.mark.full
@on_ranks(2, fresh=True)
def test_a_hundred_thousand_plans_leave_nothing():
    comm = fastcoll.communicator()
    tensor = torch.ones(300)

    def some(count: int) -> tuple[int, Counter[str], int]:
        for made in range(count):
            plan = comm.all_reduce_plan(tensor)
            if made % 20 == 0:  # a run waits for the other rank, for long on a busy machine
                tensor.fill_(1.0)
                plan()
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), Counter(thread_names()), shared_bytes()

    some(20_000)
    first = some(1000)
    last = some(100_000)
    assert not last[1] - first[1], (first, last)  # a thread may end, after 2 s without a job
    assert last[2] <= first[2], (first, last)
    assert last[0] - first[0] < 4 << 20, (first, last)


@on_ranks(2, fresh=True)
def test_the_end_of_a_group_ends_its_plans():
    group = dist.new_group()
    comm = fastcoll.communicator(group)
    plan = comm.all_reduce_plan(torch.ones(3))
    plan()
    dist.destroy_process_group(group)
    for call in (
        plan,
        lambda: comm.all_reduce(torch.ones(3)),
        lambda: comm.all_reduce_plan(torch.ones(3))(),
    ):
        with pytest.raises(dist.DistBackendError, match="the group was destroyed"):
            call()
