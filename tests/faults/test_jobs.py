"""The ``jobs`` fixture itself: what it reports of ranks that fail, and what it finds left."""

import dataclasses
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import fault_job
import psutil
import pytest
import ranks
from fault_job import Job, Jobs
from fault_rank import After, Fault, Rank
from on_ranks import on_ranks
from ranks import Limit, RanksFailed


@pytest.fixture
def own_jobs(launcher, job_store, tmp_path):
    """Jobs that may end badly."""
    jobs = Jobs(launcher, job_store, tmp_path)
    yield jobs
    jobs.close()


@on_ranks(2, world="jobs", environment={"OF_THE_JOB": "1"})
def test_a_test_runs_on_each_rank_of_a_job(tmp_path, rank):
    assert isinstance(rank, Rank) and rank.scratch.parent == tmp_path
    assert os.environ["OF_THE_JOB"] == "1"


def does(rank: Rank, what: str):
    rank.pause()
    print(f"rank {rank.rank} does it: {what}", flush=True)
    if rank.rank == 0:
        return rank.hear()
    if what == "raises":
        raise KeyError("lost")
    if what == "dies":
        os.kill(os.getpid(), 9)
    if what == "sleeps":
        time.sleep(1000)
    os._exit(3)


@pytest.mark.parametrize(
    ("what", "how", "said"),
    [
        ("raises", "raised", "KeyError: 'lost'"),
        ("dies", "ended", "---- rank 1\ndied: signal SIGKILL"),
        ("exits", "ended", "---- rank 1\ndied: exit code 3"),
    ],
)
def test_a_failure_is_reported_with_what_the_others_did(own_jobs, monkeypatch, what, how, said):
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    job = own_jobs(2, does, what)
    job.go()
    with pytest.raises(RanksFailed) as caught:
        job.hear_all()  # rank 0 waits for the test
    text = str(caught.value)
    assert caught.value.how == how
    assert said in text and f"rank 1 does it: {what}" in text
    assert "---- rank 0\nno answer in time (0.5 s after the first failure)" in text


def test_a_silent_rank_shows_the_stacks_of_all(own_jobs):
    job = own_jobs(2, does, "sleeps")
    job.go()
    with pytest.raises(RanksFailed) as caught:
        job.hear(1, timeout=0.2)
    text = str(caught.value)
    assert caught.value.how == "silent"
    assert "---- rank 1\nno answer in time (deadline 0.2 s)" in text
    assert text.count("in does") == 2 and "in hear" in text


def test_a_rank_that_ends_badly_after_its_answer(own_jobs):
    job = own_jobs(2, does, "exits")
    job.go()
    job.tell(0)
    with pytest.raises(RanksFailed, match=r"rank 1\nended with exit code 3") as caught:
        job.ended_well()
    assert caught.value.how == "ended"


def test_a_rank_that_does_not_end(own_jobs):
    job = own_jobs(2, does, "sleeps")
    job.go()
    with pytest.raises(RanksFailed, match=r"rank 1\nhas not ended within 0.2 s"):
        job.end(1, timeout=0.2)
    assert sorted(job.close()) == [0, 1]
    assert not any(psutil.pid_exists(pid) for pid in job.pids.values())


def leaves(rank: Rank, files: list[str]):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    for file in files:
        with open(file.format(pid=os.getpid()), "w"):
            pass
    return child.pid


def test_what_ranks_leave_is_found(own_jobs, monkeypatch, tmp_path):
    """Names that only contain the process's number are of others. Not in /dev/shm, where other tests look."""
    folder = tmp_path / "named"
    folder.mkdir()
    monkeypatch.setattr(fault_job, "NAMED_MEMORY", folder)
    names = ["torch_{pid}_17_0", "fastcoll-{pid}", "torch_1{pid}_{pid}_{pid}", "other-{pid}"]
    job = own_jobs(1, leaves, [f"{folder}/{name}" for name in names])
    pid = job.pids[0]
    child = job.hear(0)
    job.ended_well()
    assert own_jobs.close() == [
        f"processes [{child}]",
        f"in {folder} {[f'fastcoll-{pid}', f'torch_{pid}_17_0']}",
    ]


def test_a_machine_that_stands_still_makes_a_limit_longer(monkeypatch):
    seconds = iter([3.0, 3.0, 10.0])
    monkeypatch.setattr(ranks, "paused", lambda: next(seconds))
    limit = Limit(1.0)
    assert 0.0 < limit.left() <= 1.0
    assert 7.0 < limit.left() <= 8.0


FAULT = Fault(
    *("DistBackendError", ("DistBackendError", "RuntimeError")),
    *("all_reduce [seq 2]: rank 1 (pid 7, died. Read the end of its log.", 5.0, 0.1),
)
AGAIN = dataclasses.replace(FAULT, text="barrier [seq 3]: rank 1 (pid 7, died in all_reduce")
AFTER = After(AGAIN, "COMM_ERROR", 0.1, [])


@pytest.mark.parametrize(
    ("fault", "after", "options"),
    [
        (None, {}, {}),
        ({"kind": "ValueError"}, {}, {}),
        ({"bases": ()}, {}, {}),
        ({}, {}, {"names": [2]}),
        ({}, {}, {"since": -1000.0, "within": 1.0}),
        ({}, {"again": None}, {}),
        ({}, {"again": dataclasses.replace(AGAIN, text="barrier [seq 3]: another cause")}, {}),
        ({}, {"again": dataclasses.replace(AGAIN, seconds=1000.0)}, {}),
        ({}, {"state": "SUCCESS"}, {}),
        ({}, {"destroy": 1000.0}, {}),
        ({}, {"left": ["thread x"]}, {}),
    ],
)
def test_each_promise_after_a_fault_is_checked(fault, after, options):
    job = SimpleNamespace(name=lambda rank: f"rank {rank} (pid 7, ")
    said = "all_reduce", "Read the end of its log"
    Job.after_fault(job, {0: (FAULT, AFTER)}, *said, names=[1], since=4.9, within=1.0)
    answer = fault if fault is None else dataclasses.replace(FAULT, **fault)
    with pytest.raises(AssertionError):
        Job.after_fault(job, {0: (answer, dataclasses.replace(AFTER, **after))}, *said, **options)
