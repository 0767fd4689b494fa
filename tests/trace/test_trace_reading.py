"""What is read of a dump, files that are none, and comparisons that need many ranks."""

import json
import socket
from io import StringIO
from pathlib import Path

import pytest
from memory_bytes import KNOWN, record
from memory_bytes import dump as dump_bytes
from programs import python
from trace_entries import dump, entry

from fastcoll.trace.__main__ import main
from fastcoll.trace.analysis import analyse
from fastcoll.trace.contents import LANES, STATES
from fastcoll.trace.dumps import find, read
from fastcoll.trace.memory import load
from fastcoll.trace.report import as_json, print_report, spans


def test_one_of_many_that_differs_is_outvoted():
    dumps = [dump(r, [entry(1), entry(2, size=4 + (r == 0))], 5) for r in range(5)]
    report = analyse(dumps)
    assert report.guilty == (0,)
    assert report.verdict == ["rank 0 differs from the others at seq 2 of group '0'"]


def test_of_two_that_differ_none_is_guilty():
    report = analyse([dump(r, [entry(1, size=4 + r)], 2) for r in range(2)])
    assert report.guilty == ()
    assert report.verdict == ["ranks 0, 1 differ at seq 1 of group '0'"]


@pytest.mark.parametrize("what", [{"op": "MAX"}, {"root": 1}, {"name": "reduce"}])
def test_more_than_sizes_is_compared(what):
    report = analyse([dump(r, [entry(1, **(what if r == 2 else {}))]) for r in range(3)])
    assert report.guilty == (2,)


@pytest.mark.parametrize(
    ("results", "guilty", "text"),
    [
        ([7, 7, 8, 7], (2,), "rank 2 has another result than the others of"),
        ([6, 7, 7, 8, 7], (0, 3), "ranks 0, 3 differ in the result of"),
        ([7, 8], (), "ranks 0, 1 differ in the result of"),
        ([7, None, 8, 7], (2,), "rank 2 has another result than the others of"),
        ([7, None], (), ""),
        ([7, 7, 7], (), ""),
    ],
)
def test_results_that_differ_between_ranks(results, guilty, text):
    dumps = [
        dump(rank, [entry(1, output_digest=3), entry(2, output_digest=one)], len(results))
        for rank, one in enumerate(results)
    ]
    report, out = analyse(dumps), StringIO()
    said = [f"{text} all_reduce(float32[4], op SUM), seq 2 of group '0'"] if text else []
    assert (report.guilty, report.verdict) == (guilty, said)
    print_report(report, out)
    assert (f"completed, result {8:016x}" in out.getvalue()) == bool(text)


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "all_to_all", "scatter", "gather"])
def test_results_that_may_differ_are_not_compared(name):
    assert analyse([dump(r, [entry(1, name=name, output_digest=r + 1)]) for r in range(3)]).healthy


def test_another_result_comes_before_another_call_and_a_missing_rank():
    first = [
        dump(r, [entry(1, "tp", size=4 + (r == 0), output_digest=9), entry(1)], 4) for r in range(3)
    ]
    for rank, one in enumerate(first):
        one.entries["0"][1]["output_digest"] = 7 + (rank == 1)
    report, out = analyse(first), StringIO()
    print_report(report, out)
    assert out.getvalue().count("completed, result ") == 2
    assert report.guilty == (1,) and report.absent == (3,)
    assert [text.split(" ")[1:3] for text in report.verdict[1:]] == [["1", "has"], ["0", "differs"]]


LARGE = {"size": 1024, "input_digest": 5, "output_digest": 6}


@pytest.mark.parametrize(
    ("ours", "last", "count"),
    [
        ({}, 25, 25),
        ({}, 20, 20),
        ({}, 19, 0),
        ({"size": 1023}, 25, 0),
        ({"name": "broadcast"}, 25, 0),
        ({"input_digest": None}, 25, 0),
    ],
)
def test_equal_inputs_of_all_ranks_are_a_note(ours, last, count):
    calls = [entry(seq, **LARGE | ours) for seq in range(3, last + 3)]
    dumps = [
        dump(r, [entry(1, **LARGE), entry(2, **LARGE | {"input_digest": r + 9}), *calls, entry(50)])
        for r in range(3)
    ]
    report, out = analyse(dumps), StringIO()
    notes = [
        f"all ranks sent equal gradients in the last {count} all_reduces of group '0': does each "
        "rank read its own part of the data (DistributedSampler)?"
    ]
    assert report.healthy and report.notes == (notes if count else []) == as_json(report)["notes"]
    print_report(report, out)
    assert (notes[0] in out.getvalue()) == bool(count)
    assert analyse([*dumps[:2], dump(2, [])]).notes == analyse(dumps[:2]).notes == []
    assert analyse([dump(0, calls, 1)]).notes == []
    for one in dumps[0].entries["0"].values():
        one["input_dtypes"] = ["int32"]
    assert analyse(dumps).notes == []


def test_calls_that_were_overwritten_are_not_missed():
    all_of_it = [entry(seq) for seq in range(1, 11)]
    dumps = [dump(0, all_of_it), dump(1, all_of_it[5:], wrapped=True), dump(2, all_of_it)]
    assert analyse(dumps).healthy
    # The trace of rank 1 holds nothing of the group any more: nothing can be said of it.
    dumps[1] = dump(1, [entry(3, "1")], wrapped=True)
    report = analyse([dumps[0], dumps[1], dumps[2]])
    assert all(lane.finding is None for lane in report.lanes if lane.name == "0")


def test_a_rank_that_failed_earlier_is_not_missing_later():
    stopped = dump(2, [entry(1, state="failed", error="a fault")])
    differ = [dump(r, [entry(1), entry(2, size=4 + r, state="failed")]) for r in range(2)]
    report = analyse([*differ, stopped])
    assert [lane.finding.kind for lane in report.lanes if lane.finding] == ["mismatch"]
    assert report.first_error == (2, "a fault")


def test_what_a_missing_rank_does_instead_is_said():
    waits = [dump(r, [entry(1), entry(2, state="started")]) for r in (0, 1)]
    elsewhere = dump(2, [entry(1), entry(7, "tp", state="started")])
    text = " ".join(analyse([*waits, elsewhere]).verdict)
    assert "rank 2 has not arrived at all_reduce(float32[4], op SUM), seq 2 of group '0'" in text
    assert "rank 2 is in all_reduce(float32[4], op SUM), seq 7 of group 'tp'" in text


def test_a_rank_without_a_dump_is_named():
    waits = [dump(r, [entry(1, state="started")]) for r in (0, 1)]
    report = analyse(waits)
    assert report.absent == (2,)
    assert report.verdict == ["there is no dump of rank 2, so its state is unknown"]


def test_what_is_printed():
    frames = [
        {"name": "all_reduce", "filename": "/site-packages/torch/distributed/x.py", "line": 1},
        {"name": "step", "filename": str(Path.cwd() / "train.py"), "line": 7},
        {"name": "main", "filename": "/elsewhere/main.py", "line": 9},
    ]
    calls = [entry(1), entry(2, state="failed", error="the fault", frames=frames)]
    dumps = [dump(r, calls if r != 2 else calls[:1], 5) for r in range(4)]
    text = StringIO()
    print_report(analyse(dumps), text)
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "dumps of ranks 0-3 (written because: asked for)" in lines
    assert "0-1, 3 1 2 failed all_reduce(float32[4], op SUM)" in lines
    assert "2 1 1 completed all_reduce(float32[4], op SUM)" in lines
    assert "4 - - no dump" in lines
    assert "first difference: seq 2, missing" in lines
    assert "at train.py:7 in step" in lines
    assert "from /elsewhere/main.py:9 in main" in lines
    assert "rank 2: did not make this call" in lines
    assert "- the first error was on rank 0: the fault" in lines
    assert lines[-1] == "Look at ranks 2, 4 first."


def test_spans():
    assert spans([7, 0, 1, 2, 5]) == "0-2, 5, 7"


def test_files_are_found_by_prefix_or_folder(tmp_path):
    for name in ("t_0", "t_12", "t_x", "t_1.txt", ".t_3.part7"):
        (tmp_path / name).write_bytes(b"")
    assert sorted(find(f"{tmp_path}/t_")) == [0, 12]
    assert sorted(find(str(tmp_path))) == [0, 12]
    with pytest.raises(FileNotFoundError, match="no file is named"):
        read(f"{tmp_path}/u_")


WRONG = [(field, {field: 4}) for field in ("id", "state", "lane", "call", "op")]
WRONG += [
    ("peer", {"lane": 2, **fields}) for fields in ({"peer": 2}, {"peer": -2}, {"sends": True})
]
WRONG += [
    ("shape", {"words": (40 << 8,), "used": 41, "kept_inputs": 0}),
    ("dtype", {"words": (2, 1)}),
]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"text", "it does not begin as one"),
        (dump_bytes(slots=1 << 60), "it is cut off"),
        (dump_bytes(kept=1 << 60, records=1 << 60), "the sizes of its slots are wrong"),
        (dump_bytes(rank=-1), "its rank or its number of records is wrong"),
        (dump_bytes(records=1 << 63), "its rank or its number of records is wrong"),
        (dump_bytes(text="[" * 5000), "its JSON is broken"),
        (
            dump_bytes(text=json.dumps(KNOWN | {"bytes": [-1]})),
            r"JSON.bytes\[0\]: expected int of 32",
        ),
        (dump_bytes([record(1, stack=1)]), "a stack is cut off"),
        *[(dump_bytes([record(1, **fields)]), f"the {what} of record 1") for what, fields in WRONG],
    ],
)
def test_what_is_no_dump_is_refused(content, what):
    with pytest.raises(ValueError, match=f"^not a dump of fastcoll.trace: {what}"):
        load(content)


def test_only_the_records_that_are_kept_are_read():
    """A memory has a power of two of slots, so a record that is not kept may still be there."""
    assert [one.id for one in load(dump_bytes(kept=2)).records] == [2, 3]


def test_a_rank_that_made_no_call_is_missing(tmp_path, capsys):
    (tmp_path / "t_0").write_bytes(dump_bytes([record(1), record(2, seq=1 << 60)]))
    (tmp_path / "t_1").write_bytes(dump_bytes([], "", rank=1, json_version=0))
    assert main([f"{tmp_path}/t_"]) == 1
    said = capsys.readouterr().out
    assert "rank 1 has not arrived at all_reduce(float32[3, 4], op SUM), seq 1" in said
    (tmp_path / "t_1").write_bytes(dump_bytes())
    assert main([f"{tmp_path}/t_"]) == 2
    assert "t_1: another file is of rank 0 too" in capsys.readouterr().err


PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import fastcoll.trace
from fastcoll.trace.live import read
from fastcoll.trace.memory import load

dist.init_process_group("fastcoll", store=dist.HashStore(), rank=0, world_size=1)
assert fastcoll.trace.records() == []
backend, begin = dist.group.WORLD._get_backend(torch.device("cpu")), time.time_ns()
dist.all_reduce(torch.ones(3, 4), dist.ReduceOp.MAX)
dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
dist.all_gather([torch.ones(5, dtype=torch.uint8)], torch.ones(5, dtype=torch.uint8))
backend.monitored_barrier()
backend.abort()
try:
    dist.reduce(torch.ones(7), 0)
except RuntimeError:
    print(os.getpid(), begin, time.time_ns())
fastcoll.trace.dump(sys.argv[1])
assert read(os.getpid()).records == load(open(sys.argv[1], "rb").read()).records
assert [one.rank for one in fastcoll.trace.waits()] == [0]
"""


def test_the_layout_is_that_of_the_process_which_writes(tmp_path):
    ended = python("-c", PROGRAM, tmp_path / "t_0", variables={"FASTCOLL_TRACE_STACKS": "1"})
    assert ended.returncode == 0, ended.stderr
    pid, begin, end = map(int, ended.stdout.split())
    (trace,) = read(f"{tmp_path}/t_")
    assert (trace.pid, trace.rank, trace.host) == (pid, 0, socket.gethostname())
    assert (trace.reason, trace.recorded, trace.groups[1].ranks) == ("asked for", 5, [0])
    names, found = trace.names, trace.records
    assert [
        (names.calls[r.call], names.ops[r.op], r.root, LANES[r.lane], r.seq, STATES[r.state])
        for r in found
    ] == [
        ("all_reduce", "MAX", -1, "collective", 1, "completed"),
        ("broadcast", "-", 0, "collective", 2, "completed"),
        ("all_gather", "-", -1, "collective", 3, "completed"),
        ("barrier", "-", -1, "monitored_barrier", 1, "completed"),
        ("reduce", "SUM", 0, "collective", 4, "failed"),
    ]
    uint8, float32, float64 = map(names.dtypes.index, ("uint8", "float32", "float64"))
    assert found[0].shapes() == ([(float32, [3, 4])], [(float32, [3, 4])])
    assert found[1].shapes() == ([(float64, [2])], [(float64, [2])])
    assert found[2].shapes() == ([(uint8, [5])], [(uint8, [1, 5])])
    slack = 20_000_000  # nanoseconds, of the conversion between clocks
    for one in found:
        assert one.created <= (one.started or one.created) <= one.ended
        assert begin - slack <= trace.wall_of(one.created) <= end + slack
        assert "<module>\t<string>\t" in trace.stacks[one.stack]
    assert "rank 0 aborted the group" in trace.errors[5]
