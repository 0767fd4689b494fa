"""Where two runs first differ: in an input, in a result, or in a call."""

import json
from io import StringIO
from typing import Any

import pytest
from memory_bytes import dump as dump_bytes
from memory_bytes import record
from trace_entries import dump, entry

from fastcoll.trace.__main__ import main
from fastcoll.trace.against import compare, print_comparison
from fastcoll.trace.dumps import Dump

Changes = dict[tuple[int, int], dict[str, Any]]
DIGESTS = {"input_digest": 3, "output_digest": 7}
NONE = dict.fromkeys(DIGESTS)
INPUT, RESULT, ROOTED = {"input_digest": 4}, {"output_digest": 8}, {"op": None, "root": 0}


def run(
    changes: Changes | None = None,
    world: int = 2,
    last: int = 3,
    wrapped: bool = False,
    **ours: Any,
) -> list[Dump]:
    """Return the dumps of a run whose ranks make calls 1 to ``last``; changes are by rank and number."""
    seqs, changes = range(1, last + 1), changes or {}
    return [
        dump(
            rank,
            [entry(seq, **DIGESTS | ours | changes.get((rank, seq), {})) for seq in seqs],
            world,
            wrapped,
        )
        for rank in range(world)
    ]


ALL_RESULTS = {(0, 2): RESULT, (1, 2): RESULT}
COPIED = {"name": "all_gather", "op": None}


@pytest.mark.parametrize(
    ("changes", "ours", "kind", "ranks", "said"),
    [
        (
            {(1, 2): INPUT} | {(0, 2): RESULT},
            {},
            "input",
            (1,),
            "The input of rank 1 differs at all_",
        ),
        ({(1, 2): INPUT}, {}, "input", (1,), "rank 1 computed other values before this call."),
        ({(0, 2): INPUT, (1, 2): INPUT}, {}, "input", (0, 1), "The inputs of ranks 0-1 differ at"),
        (ALL_RESULTS, {}, "result", (0, 1), "they were combined in another order. Compare"),
        (ALL_RESULTS, COPIED, "result", (0, 1), "only copies them. So it is a fault."),
        ({(1, 2): {"size": 5}, (0, 2): INPUT}, {}, "call", (1,), "Rank 1 makes another call."),
        ({(1, 2): {"size": 5}}, {"name": "all_to_all"}, "call", (1,), "Rank 1 makes another call."),
        ({(1, 2): {"op": "MAX"} | NONE}, {}, "call", (1,), "different calls from here on"),
        ({(0, 2): INPUT}, ROOTED | {"name": "broadcast"}, "input", (0,), "at broadcast("),
        ({(1, 2): RESULT}, ROOTED | {"name": "broadcast"}, "result", (1,), "So it is a fault"),
        (
            {(1, 2): RESULT | {"input_digest": None}},
            ROOTED | {"name": "broadcast"},
            "result",
            (1,),
            "So it is a fault",
        ),
        ({(1, 2): RESULT}, {}, "result", (1,), "other ranks have the same result in both runs."),
        ({(1, 2): RESULT}, {"name": "reduce_scatter"}, "result", (1,), "in another order"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_first_difference_of_a_lane(changes, ours, kind, ranks, said, swapped):
    later = {(rank, 3): INPUT | RESULT for rank in (0, 1)}
    runs = [run(**ours), run(changes | later, **ours)]
    (found,) = compare(*(runs[::-1] if swapped else runs)).differences
    assert (found.seq, found.kind, found.ranks, found.equal_before) == (2, kind, ranks, 1)
    assert said in " ".join(found.verdict)
    assert (found.unknown, found.unchecked, found.is_oldest) == ((), 0, False)


@pytest.mark.parametrize(
    ("name", "change"),
    [("broadcast", INPUT), ("scatter", INPUT), ("reduce", RESULT), ("gather", RESULT)],
)
def test_what_only_the_root_has_is_not_compared_elsewhere(name, change):
    ours = ROOTED | {"name": name}
    assert compare(run(**ours), run({(1, 2): change}, **ours)).differences == []
    assert compare(run(**ours), run({(0, 2): change}, **ours)).differences[0].ranks == (0,)


@pytest.mark.parametrize("missing", ["trace", "call", "digest"])
def test_a_result_with_an_input_that_is_not_known(missing):
    whole, other = run(), run(ALL_RESULTS | ({(1, 2): NONE} if missing == "digest" else {}))
    if missing == "trace":
        other.pop()
    elif missing == "call":
        del other[1].entries["0"][2]
    comparison = compare(whole, other)
    (found,) = comparison.differences
    assert (found.kind, found.ranks, found.unknown) == ("result", (0,), (1,))
    assert found.verdict[1].startswith("The inputs of rank 1 are not known in both runs")
    said = ["RUN_B has no trace of rank 1."]
    assert comparison.notes == (said if missing == "trace" else [])


@pytest.mark.parametrize(
    ("seq", "wrapped", "is_oldest"),
    [
        (1, (True, False), True),
        (1, (False, True), True),
        (1, (False, False), False),
        (2, (True, True), False),
    ],
)
def test_the_first_difference_may_have_been_overwritten(seq, wrapped, is_oldest):
    runs = [run(wrapped=wrapped[0]), run({(0, seq): INPUT}, wrapped=wrapped[1])]
    (found,) = compare(*runs).differences
    text = " ".join(found.verdict)
    assert found.is_oldest == is_oldest == ("FASTCOLL_TRACE_SIZE=200 to keep all calls" in text)
    assert ("No earlier result differs" in text) != is_oldest
    assert (f"equal on rank 0: {seq - 1}." in text) != is_oldest


def test_earlier_calls_without_a_digest_are_counted():
    first, other = run(last=4), run({(0, 4): INPUT}, last=4)
    for changed, size in ((first, 4), (other, 5)):
        message = {"lane": "message", "call": f"recv(float32[{size}])"}
        for seq, what in ((1, message), (2, NONE), (3, NONE | {"output_sizes": []})):
            changed[0].entries["0"][seq] |= NONE | what
    (found,) = compare(first, other).differences
    assert (found.unchecked, found.equal_before) == (2, 0)
    assert "Earlier calls without a digest in both runs: 2." in found.verdict[1]
    runs = [run(), run({(1, 1): NONE, (0, 3): INPUT, (1, 3): INPUT})]
    (found,) = compare(*runs).differences  # of two ranks, the one of which less is known
    assert (found.ranks, found.unchecked, found.equal_before) == ((0, 1), 1, 1)


def test_runs_of_another_length_and_another_number_of_ranks():
    comparison = compare(run(world=3, last=5), run(world=2, last=3), ("a", "b"))
    assert (comparison.ranks, comparison.compared, comparison.only) == ((0, 1), 3, (2, 0))
    assert comparison.differences == []
    assert comparison.notes == [
        "Calls that only the traces of a have: 2.",
        "b has no trace of rank 2.",
        "Group '0' has 3 ranks in a, and 2 in b.",
    ]
    results = {(rank, 2): RESULT for rank in range(2)}
    (found,) = compare(run(world=3), run(results)).differences
    assert (found.kind, found.unknown) == ("result", (2,))


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({(0, 3): INPUT}, ["tp 1", "0 3"]),  # tp 1 was created at 2500, on rank 1 of the first run
        ({(0, 2): INPUT}, ["0 2", "tp 1"]),
    ],
)
def test_of_several_lanes_the_call_that_was_created_first(changes, order):
    runs = [run(), run(changes)]
    for number, one in enumerate(runs):
        for rank, time in ((0, 9000), (1, 2500)):
            ours = DIGESTS | ({"output_digest": 9} if number else {})
            other = dump(rank, [entry(1, "tp", time=time + 9000 * number, **ours)], 2)
            one[rank].entries.update(other.entries)
            one[rank].lanes.update(other.lanes)
    comparison, out = compare(*runs), StringIO()
    assert [f"{found.group} {found.seq}" for found in comparison.differences] == order
    print_comparison(comparison, out)
    later, seq = order[1].split()
    assert f"Group '{later}' differs later, from seq {seq} on (" in out.getvalue()


def test_what_is_printed():
    frames = [{"name": "step", "filename": "/train.py", "line": 7}]
    runs = [run(), run({(1, 2): {"size": 5}}, frames=frames)]
    out = StringIO()
    print_comparison(compare(*runs, ("a", "b")), out)
    assert out.getvalue().splitlines() == [
        "a and b: ranks 0-1",
        "Calls with a digest in both runs: 3.",
        "",
        "first difference: seq 2 of group '0', call",
        "  a: all_reduce(float32[4], op SUM)",
        "  b: all_reduce(float32[5], op SUM)",
        "    at /train.py:7 in step",
        "",
        "Rank 1 makes another call. The runs make different calls from here on.",
        "Earlier calls of the group that are equal on rank 1: 1.",
    ]


DIGESTED = {"state": 2, **DIGESTS}


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 0, "No difference: all inputs and results with a digest in both runs are equal."),
        (RESULT, 1, "first difference: seq 2 of group '0', result"),
        ({"words": (1 << 8 | 1, 4), "kept_outputs": 0, "outputs": 0}, 1, "'0', call"),
        ({"input_digest": 0, "output_digest": 0}, 0, "Calls with a digest in both runs: 1."),
    ],
)
def test_the_command(tmp_path, capsys, changed, status, said):
    for name, ours in (("a", {}), ("b", changed)):
        (tmp_path / name).mkdir()
        for rank in range(2):
            calls = [record(1, **DIGESTED), record(2, **DIGESTED | ours)]
            (tmp_path / name / f"t_{rank}").write_bytes(dump_bytes(calls, rank=rank))
    runs = [f"{tmp_path}/a/t_", f"{tmp_path}/b"]
    assert main(["--against", *runs]) == status
    assert said in capsys.readouterr().out
    assert main(["--against", *runs, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["ranks"]) == (runs, [0, 1])
    assert [one["seq"] for one in found["differences"]] == [2] * status


def test_nothing_to_compare(tmp_path, capsys):
    for name, digest, rank in (("a", 1, 0), ("b", 0, 0), ("c", 1, 1)):
        content = dump_bytes([record(1, input_digest=digest)], rank=rank)
        (tmp_path / f"{name}_{rank}").write_bytes(content)
    a, b, c, d = (f"{tmp_path}/{name}_" for name in "abcd")
    for runs, said in (
        ((a, b), f"{b}: no call has a digest. Run the program with FASTCOLL_DIGEST=all and"),
        ((b, a), f"{b}: no call has a digest."),
        ((a, c), f"{a} and {c}: no call of a rank has a digest in both."),
        ((a, d), f"no file is named {d}<rank>."),
    ):
        assert main(["--against", *runs]) == 2
        assert f"fastcoll.trace: {said}" in capsys.readouterr().err
    for extra in (["--pid", "1"], [a], ["--save", a], ["--flight-recorder", a]):
        with pytest.raises(SystemExit) as ended:
            main(["--against", a, a, *extra])
        assert ended.value.code == 2
