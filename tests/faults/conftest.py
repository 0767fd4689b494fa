"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from fault_job import Jobs
from launcher import TORCH, Launcher

OF_RANKS = ("fastcoll._backend", "fastcoll.trace", "fault_rank", "in_call", "in_time", "machine")
"""What each rank of a job would import: of 80 ms of processor time that a rank takes, 35."""


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """The process that forks the ranks of jobs. It has no more loaded than they need, for a fork copies its pages."""
    launcher = Launcher(preload=[*TORCH, *OF_RANKS])
    yield launcher.wait()
    launcher.close()


@pytest.fixture(scope="session")
def job_store() -> dist.TCPStore:
    """The store of all jobs, in the test's process, so that it outlives every rank."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pretended_hosts() -> int:
    """On how many pretended hosts the ranks of a test's jobs are; see over_hosts.py."""
    return 1


@pytest.fixture
def jobs(
    request: pytest.FixtureRequest,
    launcher: Launcher,
    job_store: dist.TCPStore,
    tmp_path: Path,
    pretended_hosts: int,
) -> Iterator[Jobs]:
    """``jobs(size, scenario, *arguments)``: ranks in processes of their own; see fault_job.py.

    ``@on_ranks(2, world="jobs")`` makes a test run on them, one process each; it ends when all ranks have.
    """
    jobs = Jobs(launcher, job_store, tmp_path, pretended_hosts)
    failed = request.session.testsfailed
    try:
        yield jobs
        if request.session.testsfailed == failed:  # else the ranks were left in the middle of it
            jobs.ended_well()
    finally:
        found = jobs.close()
    if request.session.testsfailed == failed:
        assert not found, f"left behind: {found}"
