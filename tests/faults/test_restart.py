"""Jobs that end as a whole, begin badly, lose a rank that comes back, or lose their store."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, IS_GLOO, beyond_gloo
from fault_list import plays
from fault_rank import Rank, catch
from in_call import tell_in_call
from in_time import assert_raised, in_time
from over_hosts import over_hosts
from rank_calls import all_reduce, repeated, works
from suite_rules import bound, full

# --- all ranks killed, then the same job again ---------------------------------------------------


def busy(rank: Rank):
    rank.used("same")
    dist.new_group([0, 1, 2])
    tell_in_call(rank, 2)
    tensor = torch.ones(1 << 21)
    while True:
        dist.all_reduce(tensor)
        tensor.fill_(1.0)


def runs_again(rank: Rank, apart: float):
    time.sleep(apart * rank.rank)
    start = time.monotonic()
    rank.used("same")
    tensor = torch.ones(1 << 21)
    dist.all_reduce(tensor)
    seconds = time.monotonic() - start
    assert torch.all(tensor == rank.size)
    rank.finish()
    return seconds


def shared_memory(pid: int) -> set[str]:
    """Return the inodes of fastcoll's memory that a process has mapped; none if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:fastcoll" in line}
    return set()


@plays(34)
@pytest.mark.parametrize("apart", [full(0.0), 0.3])
def test_all_killed_and_run_again_under_the_same_name(jobs, apart):
    """The store still holds what the dead ranks wrote. Nothing else may be left of them.

    Ranks that start apart meet the records of the dead; at the same time, all records are stale.
    """
    job = jobs.ready(3, busy, prefix="rerun/")
    memory = {inode for pid in job.pids.values() for inode in shared_memory(pid)}
    assert len(memory) == 3 or IS_GLOO, memory
    for rank in job.pids:
        job.kill(rank)
    assert [job.end(rank) for rank in job.pids] == [-9] * 3
    processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert [pid for pid in processes if memory & shared_memory(pid)] == [], "held by others"
    for seconds in jobs(3, runs_again, apart, prefix="rerun/").hear_all().values():
        # Target: as fast as the first time, but for what is stale in the store.
        in_time(seconds, 2.0 + apart)


def runs_smaller(rank: Rank):
    time.sleep(0.3 * rank.rank)
    rank.init("same")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rank.size] * 3
    rank.finish()


@plays(56)
@beyond_gloo("fastcoll's own records")
def test_a_smaller_job_restarts_over_the_records_of_the_larger(jobs):
    """torchrun keeps its store when it goes on without a host. A record with another world size is then no error."""
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
    job = jobs.ready(3, busy, prefix="smaller/", environment=elastic)
    for rank in job.pids:
        job.kill(rank)
    assert [job.end(rank) for rank in job.pids] == [-9] * 3
    elastic["TORCHELASTIC_RESTART_COUNT"] = "1"
    jobs(2, runs_smaller, prefix="smaller/", environment=elastic).hear_all()


# --- one rank killed, and back again -------------------------------------------------------------


def loses_one(rank: Rank):
    rank.used()
    tell_in_call(rank, 3)
    fault = repeated(all_reduce, rank, 100_000)
    start = time.monotonic()
    dist.destroy_process_group()
    rank.init("smaller", rank=rank.rank // 2, world_size=2)
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    rank.tell(time.monotonic() - start)
    assert fault is not None and tensor[0] == 2.0, "a wrong result was returned as success"
    dist.destroy_process_group()
    joins_again(rank)


def joins_again(rank: Rank):
    rank.used("larger")
    works(rank)
    rank.finish()


@plays(57)
@over_hosts
def test_a_group_shrinks_and_grows(jobs):
    job = jobs.ready(3, loses_one, prefix="elastic/")
    job.kill(1)
    seconds = [job.hear(rank) for rank in (0, 2)]
    late = jobs(3, joins_again, ranks=[1], prefix="elastic/")
    late.hear_all()
    job.hear_all(but=[1])
    in_time(min(seconds), 0.1)  # from the last rank's error until the smaller group has worked


# --- a bad beginning -----------------------------------------------------------------------------


def assert_refused(fault, within: float, *said: str) -> None:
    assert fault is not None and "Dist" in fault.kind, fault
    assert fault.seconds < within + bound(0.5), fault
    assert all(part in fault.text for part in said), fault.text


def begins(rank: Rank, sizes, timeout):
    fault = catch(rank.init, timeout=timeout, world_size=sizes[rank.rank])
    rank.tell("ready")  # both ranks have arrived before the timeout begins
    rank.hear()
    if fault is None:
        fault = catch(dist.all_reduce, torch.ones(3))
        catch(dist.destroy_process_group)
    return fault, rank.left()


@plays(31)
def test_a_rank_is_missing(jobs):
    job = jobs(3, begins, [3, 3, 3], 1.0, ranks=[0, 2])
    job.go()
    for fault, left in job.hear_all().values():
        said = "rank(s) 1 have not created the group", "Timed out after 1000 ms"
        assert_refused(fault, 1.0, *said)
        assert left == []


@plays(31)
@pytest.mark.parametrize("sizes", [[2, 3], [3, 2]], ids=["rank 1", "rank 0"])
def test_a_rank_has_another_world_size(jobs, sizes):
    """Two processes; one believes in three."""
    job = jobs(2, begins, sizes, 3.0)
    job.go()
    for rank, (fault, left) in job.hear_all().items():
        other = 1 - rank
        reports = f"reports that it is rank {other} of {sizes[other]}"
        assert_refused(fault, 3.0, job.name(other), reports, "same world size")
        assert left == []


def begins_as_duplicate(rank: Rank):
    fault = catch(rank.init, timeout=3.0)
    rank.pause()
    tensor = torch.full((3,), rank.rank + 1.0)
    if fault is None:
        fault = catch(dist.all_reduce, tensor)
    rank.tell((fault, tensor.tolist()))
    rank.hear()
    catch(dist.destroy_process_group)
    return rank.left()


def begun(job) -> list:
    job.go()
    return list(job.hear_all().values())


@plays(31)
@pytest.mark.parametrize("order", ["together", "late"])
def test_two_processes_with_one_rank(jobs, order):
    """One of the two is told, within the timeout; who gets a result gets the right one."""
    if order == "together":
        both = [jobs(2, begins_as_duplicate, ranks=[0, 1, 1])]
    else:  # the group has met when another rank 1 comes
        both = [jobs(2, begins_as_duplicate, prefix="duplicate/")]
    answers = begun(both[0])
    if order == "late":
        both.append(jobs(2, begins_as_duplicate, ranks=[1], prefix="duplicate/"))
        answers += begun(both[1])
    told = [fault for fault, _ in answers if fault is not None]
    for fault, value in answers:
        if fault is None:
            assert value == [3.0] * 3
        else:
            assert_refused(fault, 3.0)
    assert told, "nobody was told"
    assert any("joined as rank 1 too" in f.text and "pid" in f.text for f in told), told
    for job in both:
        job.tell_all()
        assert all(left == [] for left in job.hear_all().values())


# --- the store dies ------------------------------------------------------------------------------


def loses_its_store(rank: Rank, message):
    """Rank 2 is the store and no member of the group."""
    store = rank.store_of(2)
    if rank.rank == 2:
        rank.pause()
        return None
    dist.init_process_group(BACKEND, store=store, rank=rank.rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    used = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=used)
    unused = dist.new_group([0, 1])
    rank.pause()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=used)
    if message:
        dist.send(tensor, 1) if rank.rank == 0 else dist.recv(tensor, 0)
    faults = [catch(dist.all_reduce, tensor, group=unused), catch(dist.new_group, [0, 1])]
    dist.all_reduce(tensor)  # the others go on
    start = time.monotonic()
    dist.destroy_process_group()
    return tensor.tolist(), faults, time.monotonic() - start


@plays(9)
@pytest.mark.parametrize("message", [False, True], ids=["collectives", "first message"])
def test_the_store_dies(jobs, message):
    """Groups that were used go on, their first message included; new ones fail, target 5 s."""
    job = jobs.ready(3, loses_its_store, message)
    job.kill(2)
    job.end(2)
    job.tell(0, 1)
    for tensor, faults, seconds in job.hear_all(but=[2]).values():
        assert tensor == [16.0 if IS_GLOO else 8.0] * 3 and seconds < bound(1.0)
        if IS_GLOO:
            assert faults.pop(0) is None, "gloo connects a group when it is made"
        for fault in faults:
            assert_raised(fault, kind="DistNetworkError", within=2.0)
        assert "the rendezvous store failed" in faults[0].text or IS_GLOO, faults[0].text
