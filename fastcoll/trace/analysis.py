"""Compares the dumps of all ranks, and finds the first call in which they differ, and the rank that differs.

A lane is a sequence of numbered calls: a group's collectives, or the messages from one rank to another with one tag.
Calls of one lane belong together by their number. The first number at which the ranks differ matters, because later
differences mostly follow from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fastcoll.trace.dumps import Dump, Entry

__all__ = ["EQUAL_RESULTS", "Finding", "LaneReport", "Report", "analyse"]

EQUAL_RESULTS = frozenset(
    {
        "all_reduce",
        "allreduce_coalesced",
        "broadcast",
        "all_gather",
        "all_gather_v",
        "all_gather_into_tensor_coalesced",
        "_all_gather_base",
    }
)
"""Calls whose results are equal on all ranks."""

_KINDS = ("result", "mismatch", "missing", "failed")
"""Kinds of findings, the most important one first."""

_GRADIENT = 1024
"""Elements from which on an all_reduce of floats is taken for one of gradients."""

_EQUAL_INPUTS = 20
"""So many of them with equal inputs on all ranks are no chance."""


@dataclass(frozen=True)
class Finding:
    """The first difference in a lane.

    Attributes:
        seq: The number of the call.
        kind: "result", "mismatch", "missing" or "failed".
        guilty: The ranks with another result or call, or none; empty if they cannot be determined.
        text: The event, in one sentence.
        calls: The call of each rank at this number; None if it made none.
    """

    seq: int
    kind: str
    guilty: tuple[int, ...]
    text: str
    calls: dict[int, Entry | None]


@dataclass(frozen=True)
class LaneReport:
    """A lane, the calls of its ranks by rank and number, as far as there are dumps, and the first difference."""

    name: str
    description: str
    ranks: tuple[int, ...]
    entries: dict[int, dict[int, Entry]]
    finding: Finding | None

    @property
    def is_message(self) -> bool:
        """Whether it is a lane of messages."""
        return any(
            e["lane"] == "message" for found in self.entries.values() for e in found.values()
        )


@dataclass(frozen=True)
class Report:
    """The result for all lanes.

    Attributes:
        dumps: The dumps, by rank.
        absent: Ranks without a dump.
        lanes: Lanes of all groups.
        guilty: The ranks to look at first.
        verdict: Sentences for a person, the most important one first.
        first_error: The rank that failed first, and its error; None if none failed.
        notes: Sentences on what is no fault, but may be unintended.
    """

    dumps: dict[int, Dump]
    absent: tuple[int, ...]
    lanes: list[LaneReport]
    guilty: tuple[int, ...]
    verdict: list[str]
    first_error: tuple[int, str] | None
    notes: list[str]

    @property
    def healthy(self) -> bool:
        """Whether all ranks made the same calls, and no call failed."""
        return not self.verdict


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _those_apart(values: Mapping[int, Any]) -> tuple[int, ...]:
    """Returns the ranks that differ from the most frequent value; none if two values are equally frequent."""
    votes = Counter(values.values())
    (favourite, most), *others = votes.most_common()
    if others and others[0][1] == most:
        return ()
    return tuple(rank for rank, value in values.items() if value != favourite)


def _instead(dump: Dump, lane: str) -> str:
    """Returns the text about a rank's last call, in any group, for a rank that did not make the others' call."""
    if dump.last is None:
        return f"rank {dump.rank} made no call"
    name, last = dump.last
    where = "" if name == lane else f" of group '{name}'"
    what = "is in" if last["state"] in ("started", "scheduled") else "last called"
    text = f"rank {dump.rank} {what} {last['call']}, seq {last['seq']}{where}"
    return text + (f" ({last['sources'][0]})" if last["sources"] else "")


def _look(lane: str, ranks: Sequence[int], dumps: dict[int, Dump]) -> Finding | None:
    entries, begin = {}, 1
    for rank in ranks:
        found = dumps[rank].entries.get(lane, {})
        # Calls that were overwritten cannot be compared.
        if found or not dumps[rank].wrapped:
            entries[rank] = found
            begin = max(begin, min(found) if dumps[rank].wrapped else 1)
    last = {rank: max(found, default=0) for rank, found in entries.items()}
    # A rank whose call failed makes no later calls, so their absence is no difference.
    stopped = {r for r, seq in last.items() if seq and entries[r][seq]["state"] == "failed"}
    failure = None
    for seq in sorted({seq for found in entries.values() for seq in found if seq >= begin}):
        calls = {rank: found.get(seq) for rank, found in entries.items()}
        there = {rank: entry for rank, entry in calls.items() if entry is not None}
        first = next(iter(there.values()))
        where = f"seq {seq} of group '{lane}'"
        signatures = {rank: entry["signature"] for rank, entry in there.items()}
        results = {rank: entry["output_digest"] for rank, entry in there.items()}
        results = {rank: digest for rank, digest in results.items() if digest is not None}
        if len(set(signatures.values())) > 1:
            apart = _those_apart(signatures)
            differ = "differs from the others" if len(apart) == 1 else "differ"
            text = f"{_ranks(apart or sorted(there))} {differ} at {where}"
            return Finding(seq, "mismatch", apart, text, calls)
        if first["name"] in EQUAL_RESULTS and len(set(results.values())) > 1:
            apart = _those_apart(results)
            differ = (
                "has another result than the others" if len(apart) == 1 else "differ in the result"
            )
            text = f"{_ranks(apart or sorted(results))} {differ} of {first['call']}, {where}"
            return Finding(seq, "result", apart, text, calls)
        away = tuple(rank for rank in calls if last[rank] < seq and rank not in stopped)
        # A message that was sent and received needs no wait.
        waits = any(entry["state"] != "completed" for entry in there.values())
        if away and (waits or first["lane"] != "message"):
            came = "has not arrived" if len(away) == 1 else "have not arrived"
            doing = "; ".join(_instead(dumps[rank], lane) for rank in away)
            text = f"{_ranks(away)} {came} at {first['call']}, {where}: {doing}"
            return Finding(seq, "missing", away, text, calls)
        failed = sorted(rank for rank, entry in there.items() if entry["state"] == "failed")
        if failed and failure is None:
            text = f"{there[failed[0]]['call']}, {where}, failed on {_ranks(failed)}"
            failure = Finding(seq, "failed", (), text, calls)
    return failure


def _is_gradient(entry: Entry) -> bool:
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    floats = all(dtype.startswith(("float", "bfloat")) for dtype in dtypes)
    return entry["name"] == "all_reduce" and floats and sum(map(prod, sizes)) >= _GRADIENT


def _equal_inputs(lane: LaneReport) -> Iterator[str]:
    """Yields a note if all ranks sent the same gradients, as they do if each reads the same data."""
    made = [lane.entries.get(rank, {}) for rank in lane.ranks]
    count = 0
    for seq, entry in sorted(made[0].items(), reverse=True) if len(made) > 1 else ():
        inputs = {found[seq]["input_digest"] if seq in found else None for found in made}
        if None in inputs or not _is_gradient(entry):
            continue
        if len(inputs) > 1:
            break
        count += 1
    if count >= _EQUAL_INPUTS:
        yield (
            f"all ranks sent equal gradients in the last {count} all_reduces of group '{lane.name}': does each rank "
            "read its own part of the data (DistributedSampler)?"
        )


def analyse(dumps: Sequence[Dump], earlier: Report | None = None) -> Report:
    """Compares the dumps of the ranks of one job.

    Args:
        dumps: One of each rank.
        earlier: What was found a moment ago, of ranks that run: a rank that has not arrived at a call now, and was not
            missing there before, is on its way.
    """
    before = {} if earlier is None else {lane.name: lane.finding for lane in earlier.lanes}
    by_rank = {dump.rank: dump for dump in dumps}
    named = {name: lane for dump in dumps for name, lane in dump.lanes.items()}
    lanes = []
    for name, (description, ranks) in named.items():
        known = [rank for rank in ranks if rank in by_rank]
        entries = {rank: by_rank[rank].entries.get(name, {}) for rank in known}
        found = _look(name, known, by_rank)
        if earlier is not None and found is not None and found.kind == "missing":
            past = before.get(name)
            found = found if past is not None and past.seq == found.seq else None
        lanes.append(LaneReport(name, description, ranks, entries, found))
    failed = [
        (entry["ended_ns"] or 0, dump.rank, entry["error"])
        for dump in dumps
        for found in dump.entries.values()
        for entry in found.values()
        if entry["error"]
    ]
    first_error = min(failed)[1:] if failed else None
    findings = [lane.finding for lane in lanes if lane.finding is not None]
    findings.sort(key=lambda finding: _KINDS.index(finding.kind))
    absent = tuple(sorted({rank for lane in lanes for rank in lane.ranks} - set(by_rank)))
    verdict = []
    if absent and (findings or first_error):
        gone = "it has died, or hangs" if len(absent) == 1 else "they have died, or hang"
        verdict.append(f"there is no dump of {_ranks(absent)}: {gone} outside all groups")
    elif absent:
        verdict.append(f"there is no dump of {_ranks(absent)}, so its state is unknown")
    verdict += [finding.text for finding in findings]
    if first_error and not verdict:
        rank, error = first_error
        verdict.append(f"a call failed on rank {rank}, and no other rank is involved: {error}")
    guilty = next((finding.guilty for finding in findings if finding.guilty), ())
    if not findings or findings[0].kind not in ("result", "mismatch"):
        guilty = tuple(sorted({*absent, *guilty}))
    notes = [note for lane in lanes for note in _equal_inputs(lane)]
    return Report(by_rank, absent, lanes, guilty, verdict, first_error, notes)
