"""Dumps that no live rank wrote: files that are none, and comparisons that need many ranks."""

import pickle
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fastcoll.trace.__main__ import main
from fastcoll.trace.analysis import analyse
from fastcoll.trace.dumps import Dump, find, loads, parse, read
from fastcoll.trace.report import print_report, spans


def entry(seq: int, group: str = "0", **ours: Any) -> dict[str, Any]:
    completed = ours.get("state", "completed") == "completed"
    size = ours.pop("size", 4)
    return {
        "process_group": (group, "default_pg"),
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["float32"],
        "output_dtypes": ["float32"],
        "time_created_ns": 1000 * seq,
        "frames": [],
        "fastcoll": {
            "group": group,
            "lane": "collective",
            "seq": seq,
            "name": "all_reduce",
            "state": "completed",
            "ended_ns": 1000 * seq + 500 if completed else None,
            "op": "SUM",
            "tensors_left_out": 0,
            **ours,
        },
    }


def raw(
    rank: int, entries: list[dict[str, Any]], world: int = 3, wrapped: bool = False
) -> dict[str, Any]:
    groups = {e["process_group"][0] for e in entries} or {"0"}
    ranks = str(list(range(world)))
    recorded = 200 if wrapped else len(entries)
    ours = {"rank": rank, "reason": "asked for", "host": "h", "pid": 1, "size": 100}
    return {
        "entries": entries,
        "pg_config": {name: {"desc": "default_pg", "ranks": ranks} for name in groups},
        "fastcoll": {**ours, "recorded": recorded},
    }


def dump(*arguments: Any, **named: Any) -> Dump:
    return parse(raw(*arguments, **named))


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
    calls = [entry(1), entry(2, state="failed", error="the fault") | {"frames": frames}]
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


class Bad:
    def __reduce__(self) -> Any:
        return print, ("never",)


@pytest.mark.parametrize(
    "content", [b"", b"text", pickle.dumps([1]), pickle.dumps({"entries": []}), pickle.dumps(Bad())]
)
def test_what_is_no_dump_is_refused(content, tmp_path, capsys):
    with pytest.raises(ValueError, match="not a dump"):
        loads(content)
    (tmp_path / "t_0").write_bytes(content)
    assert main([f"{tmp_path}/t_"]) == 2
    captured = capsys.readouterr()
    assert f"{tmp_path}/t_0: not a" in captured.err
    assert "never" not in captured.out
