"""Finds the first call whose inputs or results differ between two runs of a program, by the digests in their traces.

Calls belong together by rank, lane and number. Of a lane the lowest number at which any rank differs counts, and of all
lanes the call that was created first in the first run. Messages are not compared: they have no digests, and receives
from any rank may get other numbers in another run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from fastcoll.trace.analysis import EQUAL_RESULTS
from fastcoll.trace.dumps import Dump, Entry
from fastcoll.trace.report import named_ranks, source_lines

__all__ = ["Comparison", "Difference", "compare", "print_comparison"]

_DIGESTS = {"input": "input_digest", "result": "output_digest"}
_AT_ROOT = {"input": ("broadcast", "scatter"), "result": ("gather", "reduce")}
"""Calls in which only the root has an input, or a result."""
_LARGEST = 1 << 20
"""The largest value of FASTCOLL_TRACE_SIZE."""

_Key = tuple[str, int]
"""Lane and number of a call."""
_Pair = tuple[Entry, Entry]
"""A call of one rank, in both runs."""
_Pairs = dict[_Key, dict[int, _Pair]]


@dataclass(frozen=True)
class Difference:
    """The first difference in a lane.

    Attributes:
        group: The lane.
        seq: The number of the call.
        kind: "call": the runs make different calls, or with other sizes or dtypes. "input", "result": its bits differ.
        ranks: The ranks on which it differs.
        unknown: With "result": ranks whose inputs are not known in both runs.
        equal_before: How many earlier calls of the lane are equal on each of these ranks.
        unchecked: How many earlier calls of a rank had outputs, but no digest in both runs.
        is_oldest: Whether no earlier call was compared, and calls were overwritten.
        calls: The call in each run, on the first of these ranks.
        sources: The program's lines that made it.
        verdict: Sentences for a person.
    """

    group: str
    seq: int
    kind: str
    ranks: tuple[int, ...]
    unknown: tuple[int, ...]
    equal_before: int
    unchecked: int
    is_oldest: bool
    calls: tuple[str, str]
    sources: tuple[list[str], list[str]]
    verdict: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The result for all lanes.

    Attributes:
        runs: Names of the runs.
        ranks: The ranks that both runs have.
        compared: How many calls have a digest in both runs, on any rank.
        only: How many calls are in the traces of one run only, for each run.
        differences: The first difference of each lane, the earliest one first.
        notes: Sentences on what is in one run only.
    """

    runs: tuple[str, str]
    ranks: tuple[int, ...]
    compared: int
    only: tuple[int, int]
    differences: list[Difference]
    notes: list[str]


class _Run:
    """The dumps of a run by rank, its collectives by key and rank, and the ranks of its lanes."""

    def __init__(self, name: str, dumps: Iterable[Dump]) -> None:
        self.name = name
        self.dumps = {dump.rank: dump for dump in dumps}
        self.calls: dict[_Key, dict[int, Entry]] = defaultdict(dict)
        self.members: dict[str, tuple[int, ...]] = {}
        for rank, dump in self.dumps.items():
            self.members |= {lane: ranks for lane, (_, ranks) in dump.lanes.items()}
            for lane, found in dump.entries.items():
                for seq, entry in found.items():
                    if entry["lane"] != "message":
                        self.calls[lane, seq][rank] = entry
        made = (entry for found in self.calls.values() for entry in found.values())
        if not any(entry[key] is not None for entry in made for key in _DIGESTS.values()):
            raise ValueError(
                f"{name}: no call has a digest. Run the program with FASTCOLL_DIGEST=all and "
                "FASTCOLL_TRACE_DUMP=PREFIX. Calls on CUDA tensors have none."
            )


def _both(pair: _Pair | None, key: str) -> bool:
    """Returns whether both runs have the digest."""
    return pair is not None and all(entry[key] is not None for entry in pair)


def _is_compared(pair: _Pair | None) -> bool:
    return any(_both(pair, key) for key in _DIGESTS.values())


def _has(entry: Entry, kind: str, rank: int, members: Sequence[int]) -> bool:
    """Returns whether a rank of the group has an input, or a result, in this call."""
    root = dict(enumerate(members)).get(entry["root"], rank)
    return entry["name"] not in _AT_ROOT[kind] or rank == root


def _apart(made: dict[int, _Pair], members: Sequence[int]) -> tuple[str, tuple[int, ...]] | None:
    """Returns what differs in a call, and on which ranks."""
    apart = [rank for rank, (one, other) in made.items() if one["call"] != other["call"]]
    if apart:
        return "call", tuple(apart)
    for kind, key in _DIGESTS.items():
        apart = [
            rank
            for rank, pair in made.items()
            if _has(pair[0], kind, rank, members)
            and _both(pair, key)
            and pair[0][key] != pair[1][key]
        ]
        if apart:
            return kind, tuple(apart)
    return None


def _cause(made: dict[int, _Pair], ranks: tuple[int, ...]) -> str:
    """Returns why the results of these ranks differ although the inputs are equal."""
    call = made[ranks[0]][0]
    known = [rank for rank, pair in made.items() if _both(pair, "output_digest")]
    if call["name"] in EQUAL_RESULTS and len(known) > len(ranks):
        return "and other ranks have the same result in both runs. So it is a fault: fastcoll trace compares the ranks."
    if call["op"] is None:
        return "and the call only copies them. So it is a fault."
    return (
        "so they were combined in another order. Compare the placement of the ranks, FASTCOLL_ORDER, FASTCOLL_TUNING "
        "and the version of fastcoll. If all are equal, it is a fault."
    )


def _verdict(found: Difference, recorded: int, cause: str) -> Iterator[str]:
    who, call = named_ranks(found.ranks), found.calls[0]
    if found.kind == "call":
        makes = "makes another call" if len(found.ranks) == 1 else "make other calls"
        yield f"{who.capitalize()} {makes}. The runs make different calls from here on."
    elif len(found.ranks) == 1:
        yield f"The {found.kind} of {who} differs at {call}."
    else:
        yield f"The {found.kind}s of {who} differ at {call}."
    if found.kind == "input" and found.unchecked:
        yield (
            "No earlier result that was compared differs. Earlier calls without a digest in both runs: "
            f"{found.unchecked}. Their results differ, or values that {who} computed."
        )
    elif found.kind == "input" and not found.is_oldest:
        yield f"No earlier result differs, so {who} computed other values before this call."
    elif found.kind == "result" and found.unknown:
        yield (
            f"The inputs of {named_ranks(found.unknown)} are not known in both runs, so they may differ. The other "
            "inputs are equal."
        )
    elif found.kind == "result":
        yield f"The inputs of all ranks are equal, {cause}"
    if found.is_oldest:
        keep = "all" if recorded <= _LARGEST else "more"
        yield (
            "No earlier call of the group was compared, and the traces have lost older calls. So the first difference "
            f"may be older. Set FASTCOLL_TRACE_SIZE={min(recorded, _LARGEST)} to keep {keep} calls."
        )
    else:
        yield f"Earlier calls of the group that are equal on {who}: {found.equal_before}."
    if not any(found.sources):
        yield "FASTCOLL_TRACE_STACKS=1 would show the line of the program."


def _notes(one: _Run, other: _Run, only: tuple[int, int]) -> Iterator[str]:
    ranks = {*one.dumps, *other.dumps}.union(*one.members.values(), *other.members.values())
    for run, calls in ((one, only[0]), (other, only[1])):
        missing = tuple(ranks - run.dumps.keys())
        if missing:
            yield f"{run.name} has no trace of {named_ranks(missing)}."
        if calls:
            yield f"Calls that only the traces of {run.name} have: {calls}."
    for lane in sorted(one.members.keys() & other.members.keys()):
        sizes = len(one.members[lane]), len(other.members[lane])
        if sizes[0] != sizes[1]:
            yield f"Group '{lane}' has {sizes[0]} ranks in {one.name}, and {sizes[1]} in {other.name}."


def _difference(
    one: _Run, other: _Run, pairs: _Pairs, key: _Key, apart: tuple[str, tuple[int, ...]], equal: int
) -> Difference:
    (lane, seq), (kind, ranks), made = key, apart, pairs[key]
    a, b = made[ranks[0]]
    unknown = [
        rank
        for rank in sorted({*one.members[lane], *other.members[lane]})
        if kind == "result"
        and _has(a, "input", rank, one.members[lane])
        and not _both(made.get(rank), "input_digest")
    ]
    unchecked = [
        sum(
            not _is_compared(pairs.get((name, number), {}).get(rank))
            for name, found in one.dumps[rank].entries.items()
            for number, entry in found.items()
            if entry["time_created_ns"] < made[rank][0]["time_created_ns"] and entry["output_sizes"]
        )
        for rank in ranks
    ]
    wrapped = any(run.dumps[rank].wrapped for run in (one, other) for rank in ranks)
    found = Difference(
        group=lane,
        seq=seq,
        kind=kind,
        ranks=ranks,
        unknown=tuple(unknown),
        equal_before=equal,
        unchecked=max(unchecked),
        is_oldest=wrapped and not equal,
        calls=(a["call"], b["call"]),
        sources=(a["sources"], b["sources"]),
    )
    recorded = max(dump.recorded for run in (one, other) for dump in run.dumps.values())
    return replace(found, verdict=list(_verdict(found, recorded, _cause(made, ranks))))


def compare(
    run_a: Iterable[Dump], run_b: Iterable[Dump], names: tuple[str, str] = ("RUN_A", "RUN_B")
) -> Comparison:
    """Compares the traces of two runs.

    Args:
        run_a: Dumps of the ranks of one run.
        run_b: Those of the other one.
        names: Names of the runs, for the report.

    Raises:
        ValueError: There is nothing to compare: one run has no digest, or no call has one in both runs.
    """
    one, other = _Run(names[0], run_a), _Run(names[1], run_b)
    pairs: _Pairs = defaultdict(dict)
    for key in sorted(one.calls.keys() & other.calls.keys()):
        for rank in sorted(one.calls[key].keys() & other.calls[key].keys()):
            pairs[key][rank] = one.calls[key][rank], other.calls[key][rank]
    equal: dict[str, Counter[int]] = defaultdict(Counter)
    first: dict[str, tuple[int, Difference]] = {}
    for (lane, seq), made in pairs.items():
        if lane in first:
            continue
        apart = _apart(made, one.members[lane])
        if apart is None:
            equal[lane].update(rank for rank, pair in made.items() if _is_compared(pair))
            continue
        before = min(equal[lane][rank] for rank in apart[1])
        created = min(entry["time_created_ns"] for entry in one.calls[lane, seq].values())
        first[lane] = created, _difference(one, other, pairs, (lane, seq), apart, before)
    compared = sum(any(map(_is_compared, made.values())) for made in pairs.values())
    if not compared and not first:
        raise ValueError(f"{names[0]} and {names[1]}: no call of a rank has a digest in both.")
    only = len(one.calls.keys() - other.calls.keys()), len(other.calls.keys() - one.calls.keys())
    return Comparison(
        runs=names,
        ranks=tuple(sorted(one.dumps.keys() & other.dumps.keys())),
        compared=compared,
        only=only,
        differences=[found for _, found in sorted(first.values(), key=lambda pair: pair[0])],
        notes=list(_notes(one, other, only)),
    )


def _lines(comparison: Comparison) -> Iterator[str]:
    """Yields the earliest difference, then where other lanes differ."""
    yield f"{' and '.join(comparison.runs)}: {named_ranks(comparison.ranks)}"
    yield f"Calls with a digest in both runs: {comparison.compared}."
    yield from comparison.notes
    if not comparison.differences:
        yield "\nNo difference: all inputs and results with a digest in both runs are equal."
        return
    first, *later = comparison.differences
    yield f"\nfirst difference: seq {first.seq} of group '{first.group}', {first.kind}"
    same: dict[tuple[str, ...], list[str]] = {}
    for name, call, sources in zip(comparison.runs, first.calls, first.sources, strict=True):
        same.setdefault((call, *sources), []).append(name)
    for (call, *sources), names in same.items():
        yield f"  {', '.join(names)}: {call}"
        yield from source_lines(sources)
    yield from ("", *first.verdict)
    for found in later:
        yield f"Group '{found.group}' differs later, from seq {found.seq} on ({found.kind})."


def print_comparison(comparison: Comparison, file: TextIO) -> None:
    """Prints the result for a person."""
    print(*_lines(comparison), sep="\n", file=file)
