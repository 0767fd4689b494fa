"""Something goes wrong: who was it, say torch's analyser and ours, of the dumps that the ranks wrote by themselves."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_rank import Rank, catch
from in_call import others_first, soon
from on_ranks import on_ranks
from suite_rules import until
from trace_scenarios import ask_torch

import fastcoll.trace
from fastcoll.trace.__main__ import main

ODD = 1


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    return folder


@pytest.fixture
def traced(jobs, folder):
    """Starts a job whose ranks dump into the folder."""

    def start(size, function, *arguments, **environment):
        environment |= {"FASTCOLL_TRACE_DUMP": f"{folder}/t_", "FASTCOLL_TRACE_STACKS": "1"}
        return jobs(size, function, *arguments, environment=environment)

    return start


@pytest.fixture
def said(jobs, folder, capsys):
    """Returns our report of a job, by default one that has ended, as JSON and as text, and the exit status."""

    def report(ended: bool = True):
        if ended:
            jobs.ended_well()
        capsys.readouterr()
        status = main([f"{folder}/t_", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert main([f"{folder}/t_"]) == status
        return status, found, capsys.readouterr().out

    return report


def does_five_steps(rank: Rank):
    rank.init()
    for _ in range(5):
        dist.all_reduce(torch.ones(4))


def differs(rank: Rank):
    does_five_steps(rank)
    rank.tell("ready")  # or the fault might meet a slow rank in the step before
    rank.hear()
    return catch(dist.all_reduce, torch.ones(8 + (rank.rank == ODD)))


def test_a_mismatch(traced, said, folder, tmp_path):
    job = traced(3, differs)
    job.go()
    assert all(fault is not None for fault in job.hear_all().values())
    status, report, text = said()
    assert status == 1
    assert report["guilty"] == [ODD]
    finding = report["findings"][0]
    assert (finding["group"], finding["seq"], finding["kind"]) == ("0", 6, "mismatch")
    assert finding["calls"]["1"] == "all_reduce(float32[9], op SUM)"
    assert finding["calls"]["2"] == "all_reduce(float32[8], op SUM)"
    assert "Look at rank 1 first." in text
    assert f"{Path(differs.__code__.co_filename).name}:" in text
    messages, _ = ask_torch(folder, tmp_path / "database")
    assert "Collective sequence number: 6 has errors" in messages
    # It takes the rank of the file that it reads first for right.
    assert any("Culprit rank" in message and "[[9]]" in message for message in messages)


def does_not_come(rank: Rank):
    does_five_steps(rank)
    if rank.rank == ODD:
        rank.pause()
        return None
    others_first(rank, 0, 1.0)
    return catch(dist.broadcast, torch.ones(7), 0)


def test_a_rank_that_does_not_come_dumps_too(traced, said, folder, tmp_path):
    job = traced(3, does_not_come)
    job.hear_all()
    job.tell(0)
    assert "imed out" in job.hear(0).text
    assert "imed out" in job.hear(2).text
    until((folder / "t_1").exists)
    job.tell(ODD)
    status, report, text = said()
    assert status == 1
    assert report["guilty"] == [ODD]
    assert report["findings"][0]["kind"] == "missing"
    assert report["findings"][0]["seq"] == 6
    assert "rank 1 has not arrived at broadcast(float32[7], root 0), seq 6 of group '0'" in text
    assert "rank 1 last called all_reduce(float32[4], op SUM), seq 5" in text
    messages, _ = ask_torch(folder, tmp_path / "database")
    assert "Not all ranks joining collective, sequence number: 6" in messages
    assert "missing ranks: {1}" in messages


def dies(rank: Rank):
    does_five_steps(rank)
    rank.pause()
    return catch(dist.all_reduce, torch.ones(8))


def test_a_rank_that_died_has_no_dump(traced, said, folder):
    job = traced(3, dies)
    job.hear_all()
    job.kill(ODD)
    for rank in (0, 2):
        job.tell(rank)
        assert "died" in job.hear(rank).text
    status, report, text = said()
    assert status == 1
    assert report["absent"] == report["guilty"] == [ODD]
    assert "there is no dump of rank 1" in text
    assert "died" in report["first_error"][1]


def receives_for_ever(rank: Rank, *source: int):
    """The first message comes, the second does not."""
    rank.used()
    if rank.rank == ODD:
        dist.send(torch.ones(3), 0)
        rank.hear()
        return None
    dist.recv(torch.ones(3), ODD)
    soon(1.0)
    return catch(dist.recv, torch.ones(5), *source)


@pytest.mark.parametrize("source", [[ODD], []], ids=["from one", "from any"])
def test_a_message_that_is_not_sent(traced, said, folder, source):
    job = traced(2, receives_for_ever, *source)
    assert "imed out" in job.hear(0).text
    until((folder / "t_1").exists)
    job.tell(ODD)
    status, report, text = said()
    if source:
        assert report["guilty"] == [ODD]
        assert report["findings"][0]["seq"] == 2
        assert "rank 1 has not arrived at recv(float32[5], from rank 1, tag 0), seq 2" in text
    else:  # no rank is guilty, and the job has failed
        assert status == 1 and "imed out" in report["first_error"][1]
        assert "No divergence" not in text


def fails_at_last(rank: Rank, path: str):
    """A fault that leaves the group as good as before, and later one that does not."""
    rank.used()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if rank.rank == 0:
        fault = catch(backend.monitored_barrier, timedelta(milliseconds=300))
        assert fault is not None and "monitoredBarrier" in fault.text and not Path(path).exists(), (
            fault
        )
    dist.all_reduce(torch.ones(1))
    return catch(dist.all_reduce, torch.ones(2 + rank.rank))


def test_a_harmless_fault_leaves_the_dump_to_the_real_one(traced, said, folder):
    job = traced(2, fails_at_last, str(folder / "t_0"))
    assert all("Detected mismatch" in fault.text for fault in job.hear_all().values())
    _, report, _ = said()
    assert report["findings"][0]["kind"] == "mismatch"


@on_ranks(2, world="jobs")
def test_a_failed_call_has_its_error_and_the_first_refused_one_too(rank):
    rank.used()
    assert all(catch(dist.all_reduce, torch.ones(2 + rank.rank)) for _ in range(3))
    records = fastcoll.trace.records()
    states = [(r["collective_seq_id"], r["fastcoll"]["state"]) for r in records]
    assert states == [(1, "completed"), (2, "failed"), (3, "failed")]
    assert "Detected mismatch" in records[1]["fastcoll"]["error"]
    assert records[1]["state"] == "started"
    assert records[1]["time_discovered_completed_ns"] is None
    assert "Detected mismatch" in records[2]["fastcoll"]["error"]
    assert records[2]["state"] == "scheduled"


def fails_without_a_folder(rank: Rank):
    rank.used()
    return catch(dist.all_reduce, torch.ones(2 + rank.rank))


def test_a_dump_that_cannot_be_written_is_said_and_harms_nothing(jobs, tmp_path):
    nowhere = {"FASTCOLL_TRACE_DUMP": f"{tmp_path}/nowhere/t_"}
    job = jobs(2, fails_without_a_folder, environment=nowhere)
    for fault in job.hear_all().values():
        assert "Detected mismatch" in fault.text
    job.ended_well()
    assert "nowhere/t_0 cannot be written: No such file or directory" in job.log(0)
    at_start = f"no trace can be written to {tmp_path}/nowhere/: No such file or directory. Make this folder"
    assert at_start in job.log(0).partition("cannot be written")[0]
