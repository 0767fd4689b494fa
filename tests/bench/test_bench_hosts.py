"""The benchmark between hosts: what a host must send, and a run on two pretended ones."""

from unittest import mock

import pytest
from bench_ranks import run_on
from programs import python

from fastcoll.bench import hosts, namespaces
from fastcoll.bench.derived import least_bytes
from fastcoll.bench.options import HOST_CALLS
from fastcoll.bench.record import read_record


def test_least_bytes():
    assert least_bytes("all_reduce", 1000, 2) == 1000
    assert least_bytes("all_reduce", 1000, 4) == 1500
    assert least_bytes("all_gather", 1000, 4) == 750
    assert least_bytes("broadcast", 1000, 4) == 1000
    assert least_bytes("gather", 1000, 4) is None


def test_every_call_is_verified(world):
    """Before and after the timed calls, with both backends."""
    given = ("--rounds", "1", "--bytes", "4", "70000")
    ended = run_on(world, 3, *given, module="fastcoll.bench.hosts")
    assert ended.stdout.splitlines()[-1] == "# wrong elements: 0 OK"
    assert {case["call"] for case in ended.cases} == set(HOST_CALLS)
    wrong = {case[backend]["wrong"] for case in ended.cases for backend in ("fastcoll", "gloo")}
    assert wrong == {0}


def run_rank(arguments):
    """Be one rank. Results on rank 1 have a last element that is off by one."""
    prepared = hosts._prepared

    def corrupting(*given):
        case, call = prepared(*given)
        return case, lambda: (call(), case.receive[-1:].add_(case.rank == 1))

    with mock.patch.object(hosts, "_prepared", corrupting):
        return hosts.run_rank(arguments)


def test_wrong_results_are_counted(world):
    calls = ("all_reduce", "all_gather", "all_to_all", "send", "exchange")
    given = ("--rounds", "1", "--bytes", "4", "--call", *calls)
    ended = run_on(world, 2, *given, module=__name__, status=1)
    assert ended.stdout.splitlines()[-1] == "# wrong elements: 20 FAILED"
    for case in ended.cases:
        assert (case["fastcoll"]["wrong"], case["gloo"]["wrong"]) == (2, 2), case


@pytest.mark.full
def test_a_run_on_two_hosts(tmp_path):
    if problem := namespaces.missing():
        pytest.skip(problem)
    path = tmp_path / "record.jsonl"
    given = ["--rounds", 2, "--megabits", 500, "--bytes", 1 << 20, "--json", path]
    done = python("-m", "fastcoll.bench.hosts", *given, "--call", "barrier", "all_reduce")
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(path)
    assert (record["transport"], record["hosts"]) == ("shm+gloo", 2)
    assert record["ranks_per_host"] == 2
    barrier, all_reduce = record["cases"]
    assert (barrier["call"], all_reduce["call"]) == ("barrier", "all_reduce")
    # Each byte once, with what frames, TCP and Ethernet add; gloo's ring sends half as many again.
    assert 1 << 20 < all_reduce["fastcoll"]["sent"] < 1.1 * (1 << 20) < all_reduce["gloo"]["sent"]
    shaped = (1 << 20) - namespaces.BURST
    assert all_reduce["fastcoll"]["ms"] > shaped * 8 / 500e3  # no faster than the link


@pytest.mark.full
def test_the_benchmark_on_two_hosts(tmp_path):
    if problem := namespaces.missing():
        pytest.skip(problem)
    path = tmp_path / "record.jsonl"
    bench = "all_reduce -b 64K -e 64K -n 2 --rounds 1 --json"
    given = ["--megabits", 0, "--", *bench.split(), path]
    done = python("-m", "fastcoll.bench.hosts", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 2 hosts" in done.stdout
    record = read_record(path)
    assert record["hosts"] == 2
    assert record["command"].startswith("python -m fastcoll.bench.hosts --hosts 2 --per-host 2")


@pytest.mark.parametrize("wrong", [["--hosts", "1"], ["--per-host", "0"], ["--rounds", "0"]])
def test_what_makes_no_sense_is_refused(wrong, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        hosts.main(wrong)
    assert "expected 2 hosts or more" in capsys.readouterr().err
