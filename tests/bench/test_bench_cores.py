"""Ranks that the benchmark binds to cores of their own, and all_reduce by more and more of them."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from programs import python
from world import here

from fastcoll._launch import launch
from fastcoll.bench import cores, run
from fastcoll.bench.__main__ import main
from fastcoll.bench.record import read_record

ALLOWED = sorted(os.sched_getaffinity(0))
TABLE = """
ranks cores     size     fastcoll         gloo  gloo/fastcoll       floor floor/fastcoll
       each                  (us)         (us)                       (us)
    2     1    1 MiB        100.0        250.0          2.50x        50.0          0.50x
    2     2    1 MiB        100.0            -              -        50.0          0.50x
# no time is left for (ranks x cores of each): 4 x 1
"""


def bound_to() -> list[int]:
    """Bind a thread, because this rank lives on, and return its cores."""
    with ThreadPoolExecutor(1) as one:
        one.submit(run._bind, here().rank, 1).result()
        return sorted(one.submit(os.sched_getaffinity, 0).result())


@pytest.mark.skipif(len(ALLOWED) < 2, reason="two ranks need two cores")
def test_each_rank_has_cores_of_its_own(world):
    assert world(2).run(bound_to, init=False) == [[core] for core in ALLOWED[:2]]


def test_started_ranks_compute_with_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = "import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))"
    assert launch([sys.executable, "-c", script], 1, 3) == 3


def test_too_many_cores_are_refused(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    count = len(ALLOWED)
    assert main(["all_reduce", "--cores", str(count)]) == 2
    said = f"--cores {count}: 2 ranks need {2 * count} cores, and may use {count}\n"
    assert capsys.readouterr().err == f"fastcoll.bench: {said}"


def test_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["cores"]) == 2
    assert "expected no launcher" in capsys.readouterr().err


def test_mpi_needs_its_launcher(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PATH", "")
    assert main(["cores", "--backend", "fastcoll,mpi"]) == 2
    assert "there is no mpiexec.gforker" in capsys.readouterr().err


@pytest.fixture
def made(monkeypatch):
    """The runs, of 2.6 minutes each; with two cores, they fail and lack gloo."""
    monkeypatch.delenv("RANK", raising=False)
    clock, made = [0.0], []
    monkeypatch.setattr(cores.time, "monotonic", lambda: clock[0])

    def measure(ranks, each, options):
        clock[0] += 2.6 * 60
        made.append((ranks, each))
        times = {"fastcoll": 100.0, "gloo": 250.0} if each == 1 else {"fastcoll": 100.0}
        backends = {name: {"time": {"median": time}} for name, time in times.items()}
        case = {"size": 1 << 20, "floor": {"time": {"median": 50.0}}, "backends": backends}
        return each - 1, [{"ranks": ranks, "cores_each": each, **case}]

    monkeypatch.setattr(cores, "_run", measure)
    return made


def test_all_numbers_that_the_machine_has_cores_for(made, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    path = tmp_path / "record.jsonl"
    assert main(["cores", "--minutes", "100", "--json", str(path)]) == 1
    assert made == [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]
    record = read_record(path)
    assert [(case["ranks"], case["cores_each"]) for case in record["cases"]] == made
    assert record["missing"] == []


def test_no_run_begins_that_would_end_too_late(made, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert main(["cores"]) == 1
    assert made == [(2, 1), (2, 2)]  # in 5.2 minutes, and 4 ranks take as long
    assert capsys.readouterr().out == TABLE


@pytest.mark.full
@pytest.mark.skipif(len(ALLOWED) < 2, reason="two ranks need two cores")
def test_real_runs(tmp_path):
    path = tmp_path / "record.jsonl"
    done = python("-m", "fastcoll.bench", "cores", "--end", "1M", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cores a rank" in done.stdout  # as the first rank sees it
    table = done.stdout.partition("\nranks cores ")[2].splitlines()
    case = read_record(path)["cases"][0]
    assert (case["ranks"], case["cores_each"], case["size"]) == (2, 1, 256 << 10)
    assert table[2].split()[:4] == ["2", "1", "256", "KiB"]
