"""A process forks after init: the child may not use the group, and the parent goes on."""

import os
import signal
import threading
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from backend import BACKEND
from fault_list import plays
from fault_rank import Rank, catch
from on_ranks import on_ranks
from rank_calls import works
from suite_rules import bound, full

import fastcoll


def forks(rank: Rank, how: str):
    rank.used()
    works(rank)
    plans = {}
    if BACKEND == "fastcoll":
        plans = {"plan": fastcoll.communicator().all_reduce_plan(torch.ones(3))}
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        tensor = torch.ones(3)
        faults = {"nothing": None}
        if how == "uses":
            faults = {
                "all_reduce": catch(dist.all_reduce, tensor),
                "async": catch(lambda: dist.all_reduce(tensor, async_op=True).wait()),
                "barrier": catch(dist.barrier),
                "send": catch(dist.send, tensor, 1 - rank.rank),
                "recv": catch(dist.recv, tensor, 1 - rank.rank),
                **{name: catch(plan) for name, plan in plans.items()},
            }
        elif how == "destroys":
            faults = {"destroy": catch(dist.destroy_process_group)}
        text = "\n".join(f"{name}: {fault and fault.text}" for name, fault in faults.items())
        os.write(write, text.encode())
        os.close(write)
        raise SystemExit(0)  # through the whole end of the interpreter
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    code = psutil.Process(child).wait(8.0)
    works(rank)
    rank.finish()
    return said, code


@pytest.mark.parametrize(
    "how, said",
    [
        pytest.param("exits", "nothing: None", marks=[plays(20), pytest.mark.full]),
        full("destroys", "destroy: None"),
        pytest.param("uses", None, marks=plays(20)),
    ],
)
def test_a_forked_child(jobs, how, said):
    job = jobs(2, forks, how, real_exits=[0])
    for found, code in job.hear_all(timeout=40).values():
        assert code == 0, (found, code, job.logs())
        if said is not None:
            assert found == said
            continue
        lines = found.split("\n")
        assert len(lines) == 5 + (BACKEND == "fastcoll")
        assert all("fork" in line for line in lines), found
        assert all("Create process groups after the fork" in line for line in lines), found


@plays(20)
@on_ranks(2, world="jobs")
def test_a_child_of_a_process_that_is_in_a_call(rank):
    """Rank 0 forks while its other thread calls, so that thread holds a lock of the engine at some forks."""
    rank.used()
    last = threading.Event()

    def calls():
        ended = torch.zeros(1)
        while not ended.item():
            ended.fill_(float(last.is_set()))
            dist.all_reduce(ended, async_op=True).wait()

    thread = threading.Thread(target=calls)
    thread.start()
    codes = []
    for _ in range(40 if rank.rank == 0 else 0):
        child = os.fork()
        if child == 0:
            fault = catch(dist.all_reduce, torch.ones(3))
            os._exit(0 if fault is not None and "fork" in fault.text else 1)
        try:
            codes.append(psutil.Process(child).wait(bound(2)))
        except psutil.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes.append("it hung")
            break
    if rank.rank == 0:
        last.set()
    thread.join()
    assert codes == [0] * len(codes), codes
    rank.finish()


@on_ranks(2, world="jobs")
def test_children_with_a_group_of_their_own(rank):
    """A child may make groups of its own, with other children."""
    rank.used()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore(*rank.address, is_master=False)
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d.GroupMember.WORLD = None
        store = dist.PrefixStore(f"children{rank.scratch}", store)
        dist.init_process_group(
            BACKEND, store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=8)
        )
        tensor = torch.full((4,), rank.rank + 1.0)
        dist.all_reduce(tensor)
        raise SystemExit(0 if tensor.tolist() == [3.0] * 4 else 3)
    assert psutil.Process(child).wait(8.0) == 0
    works(rank)
    rank.finish()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([float(index * index)])


@plays(20)
@on_ranks(2, world="jobs")
def test_data_loader_with_forked_workers(rank):
    rank.used()
    for _ in range(2):  # epochs: workers come and go
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = torch.zeros(1)
        for batch in loader:
            part = batch.sum(0)
            dist.all_reduce(part)
            total += part
        assert total.item() == 2.0 * sum(i * i for i in range(40))
    works(rank)
    dist.destroy_process_group()
