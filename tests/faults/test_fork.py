"""A process forks after init: the child may not use the group, and the parent goes on."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from fault_list import plays
from fault_rank import Rank, catch


def wait_for(child: int, timeout: float = 8.0) -> int | None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)  # its stacks go to the log
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def check(rank: Rank) -> None:
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(rank.size)] * 100
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [float(rank.size**2)] * 100


def forks(rank: Rank, how: str):
    rank.used()
    check(rank)
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
    code = wait_for(child)
    check(rank)
    dist.destroy_process_group()
    return said, code, rank.left()


@plays(20)
@pytest.mark.full
def test_child_that_only_exits(jobs):
    job = jobs(2, forks, "exits", real_exit=True)
    for said, code, left in job.hear_all(timeout=40).values():
        assert said == "nothing: None" and code == 0, (said, code, job.logs())
        assert left == []
    job.ended_well()


@plays(20)
def test_child_that_uses_the_group(jobs):
    job = jobs(2, forks, "uses", real_exit=True)
    for said, code, left in job.hear_all(timeout=40).values():
        assert code == 0, (said, code, job.logs())
        lines = said.split("\n")
        assert len(lines) == 5
        for line in lines:
            assert "fork" in line and "Create process groups after the fork" in line, said
        assert left == []
    job.ended_well()


@pytest.mark.full
def test_child_that_destroys_the_group(jobs):
    job = jobs(2, forks, "destroys", real_exit=True)
    for said, code, left in job.hear_all(timeout=40).values():
        assert said == "destroy: None" and code == 0, (said, code, job.logs())
        assert left == []
    job.ended_well()


def forks_with_its_own_group(rank: Rank):
    """A child may make groups of its own, with other children."""
    rank.used()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore(*rank.address, is_master=False)
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d.GroupMember.WORLD = None
        store = dist.PrefixStore(f"children{rank.folder}", store)
        dist.init_process_group(
            dist_name(), store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=8)
        )
        tensor = torch.full((4,), rank.rank + 1.0)
        dist.all_reduce(tensor)
        raise SystemExit(0 if tensor.tolist() == [3.0] * 4 else 3)
    code = wait_for(child)
    check(rank)
    return code


def dist_name() -> str:
    from backend import BACKEND

    return BACKEND


def test_children_with_a_group_of_their_own(jobs):
    job = jobs(2, forks_with_its_own_group, real_exit=True)
    codes = job.hear_all(timeout=40)
    assert codes == {0: 0, 1: 0}, job.logs()
    job.ended_well()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([float(index * index)])


def loads_data(rank: Rank):
    rank.used()
    sums = []
    for _ in range(2):  # epochs: workers come and go
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = torch.zeros(1)
        for batch in loader:
            part = batch.sum(0)
            dist.all_reduce(part)
            total += part
        sums.append(total.item())
    check(rank)
    return sums


@plays(20)
def test_data_loader_with_forked_workers(jobs):
    job = jobs(2, loads_data, real_exit=True)
    expected = 2.0 * sum(i * i for i in range(40))
    assert job.hear_all(timeout=60) == dict.fromkeys(range(2), [expected] * 2)
    job.ended_well()
