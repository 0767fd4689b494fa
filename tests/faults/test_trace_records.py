"""What the trace keeps of the calls of a process that does nothing wrong."""

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from backend import wait_all
from fault_rank import PATIENT, Rank, catch
from on_ranks import on_ranks
from suite_rules import until
from trace_scenarios import ask_torch, every_kind

import fastcoll.trace
from fastcoll._load import C
from fastcoll.trace.__main__ import main
from fastcoll.trace.analysis import analyse
from fastcoll.trace.dumps import parse, read
from fastcoll.trace.flight_recorder import flight_recorder


def calls_every_kind(rank: Rank, prefix: str):
    rank.init()
    names = every_kind(rank.rank, rank.size)
    # Messages in both directions, of two tags, whose receives are in another order than their sends.
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    works = [dist.isend(torch.ones(3), right, tag=1), dist.isend(torch.ones(4), right, tag=2)]
    works += [dist.irecv(torch.ones(4), left, tag=2), dist.irecv(torch.ones(3), left, tag=1)]
    wait_all(works)
    if rank.rank == 1:
        sources = {dist.recv(torch.ones(2)) for _ in range(rank.size - 1)}
        assert sources == {0, 2}
    else:
        dist.send(torch.ones(2), 1)
    reversed_pair = dist.new_group([2, 0])
    if rank.rank != 1:
        dist.all_reduce(torch.ones(3), group=reversed_pair)
    dump = fastcoll.trace.dump(f"{prefix}{rank.rank}")
    dist.destroy_process_group()  # else this process ends at once, and one that still reads loses what it sent
    return names, dump


@pytest.mark.parametrize("shared_memory", ["require", "off"])
def test_a_healthy_run(jobs, tmp_path, capsys, shared_memory):
    """Every kind of call is there with sizes and times; torch and we find no divergence."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    environment = {"FASTCOLL_SHARED_MEMORY": shared_memory}
    dumps = jobs(3, calls_every_kind, f"{folder}/t_", environment=environment).hear_all()
    for rank, (expected, dump) in dumps.items():
        assert_whole(rank, expected, dump)
    assert main([f"{folder}/t_"]) == 0
    text = capsys.readouterr().out
    assert "No divergence: all ranks made the same calls, and no call failed." in text
    assert "messages between ranks: 8 sequences" in text
    said, collectives = ask_torch(folder, tmp_path / "database")
    assert said == []
    # All were matched: collectives of three ranks, of two in the smaller group, and messages.
    assert all(one.pass_check for one in collectives)
    entries = sum(len(dump["entries"]) for _, dump in dumps.values())
    assert sum(len(one.expected_ranks) for one in collectives) == entries


def assert_whole(rank, expected, dump):
    collectives = [e for e in dump["entries"] if not e["is_p2p"]]
    names = [record["fastcoll"]["name"] for record in collectives]
    assert names[: len(expected)] == expected
    numbered = [e for e in collectives if e["process_group"][0] == "0"]
    assert [e["collective_seq_id"] for e in numbered] == list(range(1, len(numbered) + 1))
    for entry in dump["entries"]:
        assert entry["state"] == entry["fastcoll"]["state"] == "completed", entry
        assert entry["retired"]
        moments = [entry[f"time_{what}_ns"] for what in ("created", "discovered_started")]
        moments.append(entry["time_discovered_completed_ns"])
        assert moments == sorted(moments), entry
        assert abs(moments[0] - time.time_ns()) < 60e9
        assert 0 <= entry["duration_ms"] < 60e3
    first = dump["entries"][0]
    assert first["input_sizes"] == first["output_sizes"] == [[4, 2]]
    assert first["input_dtypes"] == ["float32"]
    assert first["fastcoll"]["op"] == "SUM"
    assert first["process_group"] == ("0", "default_pg")
    assert first["timeout_ms"] == 1000 * PATIENT
    assert dump["fastcoll"]["rank"] == rank
    ids = [entry["record_id"] for entry in dump["entries"]]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("kept", [1, 7, 16])
@on_ranks(1, world="jobs")
def test_only_the_last_calls_are_kept(rank, kept):
    os.environ["FASTCOLL_TRACE_SIZE"] = str(kept)
    rank.init()
    for count in range(1, 50):
        dist.all_reduce(torch.ones(count))
    dump = fastcoll.trace.dump()
    last = list(range(1, 50))[-kept:]
    assert [entry["collective_seq_id"] for entry in dump["entries"]] == last
    assert [entry["input_sizes"] for entry in dump["entries"]] == [[[count]] for count in last]
    assert dump["fastcoll"]["recorded"] == 49


@on_ranks(1, world="jobs")
def test_calls_of_a_group_that_has_ended_are_kept(rank):
    rank.init()
    ended = dist.new_group([0])
    dist.all_reduce(torch.ones(2), group=ended)
    dist.destroy_process_group(ended)
    del ended  # the trace's group ends with it
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(4), group=dist.new_group([0]))  # which forgets groups
    dump = fastcoll.trace.dump()
    assert [entry["input_sizes"] for entry in dump["entries"]] == [[[2]], [[3]], [[4]]]
    assert dump["fastcoll"]["unreadable"] == 0


@on_ranks(1, world="jobs", environment={"FASTCOLL_TRACE_SIZE": "0"})
def test_it_can_be_switched_off(rank):
    rank.init()
    dist.all_reduce(torch.ones(1))
    assert fastcoll.trace.records() == []
    with pytest.raises(RuntimeError, match="FASTCOLL_TRACE_SIZE above 0"):
        fastcoll.trace.dump()


@on_ranks(1, world="jobs")
def test_what_does_not_fit_is_counted(rank):
    rank.init()
    dist.all_to_all([torch.ones(1, 2, 3)], [torch.ones(1, 2, 3)])
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce_coalesced(
        [torch.ones(1, 2, 3, 4) for _ in range(20)]
    ).wait()
    fits, cut = fastcoll.trace.records()
    assert fits["fastcoll"]["tensors_left_out"] == 0
    assert cut["fastcoll"]["tensors_left_out"] == 32
    assert cut["input_sizes"] == [[1, 2, 3, 4]] * 8
    assert cut["output_sizes"] == []


@on_ranks(2, world="jobs")
def test_threads_write_at_once(rank):
    rank.init()
    groups = [dist.new_group([0, 1]) for _ in range(4)]

    def call(group, count):
        for _ in range(40):
            dist.all_reduce(torch.ones(count), group=group)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, group, i + 1) for i, group in enumerate(groups)]
        while not all(one.done() for one in calls):
            fastcoll.trace.dump()  # a reader among the writers
    for one in calls:
        one.result()
    records = fastcoll.trace.records()
    assert len(records) == 160
    assert {record["state"] for record in records} == {"completed"}
    for group in {record["process_group"][0] for record in records}:
        mine = [r for r in records if r["process_group"][0] == group]
        assert [r["collective_seq_id"] for r in mine] == list(range(1, 41))
        assert len({str(r["input_sizes"]) for r in mine}) == 1
    dist.destroy_process_group()


def states():
    return [record["state"] for record in fastcoll.trace.records()]


def has_work_under_way(rank: Rank):
    rank.init()
    if rank.rank == 0:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        until(lambda: states() == ["started", "scheduled"])
        rank.tell("under way")
        wait_all(works)
    else:
        rank.hear()
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
    return states()


def test_asynchronous_calls_are_scheduled_then_started_then_completed(jobs):
    job = jobs(2, has_work_under_way)
    assert job.hear(0) == "under way"
    job.tell(1)
    assert job.hear_all() == {0: ["completed"] * 2, 1: ["completed"] * 2}


def the_line_that_calls():
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("wanted", [True, False])
@on_ranks(1, world="jobs")
def test_stacks_are_kept_on_request(rank, wanted):
    os.environ["FASTCOLL_TRACE_STACKS"] = str(int(wanted))
    rank.init()
    the_line_that_calls()
    thread = threading.Thread(target=the_line_that_calls)
    thread.start()
    thread.join()
    records = fastcoll.trace.records()
    assert len(records) == 2
    for record in records:
        found = [f for f in record["frames"] if f["name"] == the_line_that_calls.__name__]
        line = the_line_that_calls.__code__.co_firstlineno + 1
        expected = [{"name": "the_line_that_calls", "filename": __file__, "line": line}]
        assert found == (expected if wanted else [])
        assert bool(record["frames"]) == wanted


@on_ranks(2, world="jobs")
def test_a_fork_has_no_trace_of_its_parent(rank):
    rank.used()
    file = rank.scratch / f"child{rank.rank}"
    child = os.fork()
    if child == 0:
        fault = catch(dist.all_reduce, torch.ones(1))
        before = fastcoll.trace.records()
        own = C.ProcessGroupFastcoll(dist.HashStore(), 0, 1, C.Options())
        own.allreduce([torch.ones(5)])
        found = (before, fault.text, fastcoll.trace.records())
        file.write_bytes(pickle.dumps(found))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(fastcoll.trace.records()) == 1
    before, text, after = pickle.loads(file.read_bytes())
    assert before == []
    assert "this process is a fork" in text
    assert [(entry["record_id"], entry["input_sizes"]) for entry in after] == [(1, [[5]])]


def makes_groups_again(rank: Rank, prefix: str):
    if rank.rank == 0:  # the other has had no group of this name before
        rank.init("alone", rank=0, world_size=1)
        dist.all_reduce(torch.ones(7))
        dist.destroy_process_group()
    rank.init("shared")
    dist.all_reduce(torch.ones(2))
    fastcoll.trace.dump(f"{prefix}{rank.rank}")


def test_groups_of_one_name_are_told_apart(jobs, tmp_path):
    jobs(2, makes_groups_again, f"{tmp_path}/t_").hear_all()
    dumps = [parse(flight_recorder(trace)) for trace in read(f"{tmp_path}/t_")]
    assert set(dumps[0].lanes) == {"0", "0 earlier 1"}
    assert set(dumps[1].lanes) == {"0"}
    assert analyse(dumps).healthy
