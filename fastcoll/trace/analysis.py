"""Compares the dumps of all ranks: where did they first do different things, and who was it.

Within a lane (see :class:`fastcoll.trace.dumps.Lane`) calls belong together by their number. The first number at
which the ranks differ is the one that counts; what follows is mostly its consequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastcoll.trace.dumps import Dump, Entry, Lane

__all__ = ["Finding", "LaneReport", "Report", "analyse"]


@dataclass(frozen=True)
class Finding:
    """The first difference in a lane.

    Attributes:
        lane: Where.
        seq: The number of the call.
        kind: "mismatch", "missing" or "failed".
        guilty: The ranks that did something else or nothing; empty where that cannot be told.
        text: What happened, one sentence.
        calls: What each rank did at this number; None for nothing.
    """

    lane: Lane
    seq: int
    kind: str
    guilty: tuple[int, ...]
    text: str
    calls: dict[int, Entry | None]


@dataclass(frozen=True)
class LaneReport:
    """How far each rank came in a lane: the last completed call and the last one made; None for none."""

    lane: Lane
    completed: dict[int, int | None]
    last: dict[int, Entry | None]
    finding: Finding | None


@dataclass
class Report:
    """The whole.

    Attributes:
        dumps: By rank.
        absent: Ranks of which there is no dump.
        lanes: Of all groups.
        guilty: The ranks to look at first.
        verdict: Sentences for a person, the most important one first.
        first_error: The rank that failed first, and its error; None if none failed.
    """

    dumps: dict[int, Dump]
    absent: tuple[int, ...]
    lanes: list[LaneReport] = field(default_factory=list)
    guilty: tuple[int, ...] = ()
    verdict: list[str] = field(default_factory=list)
    first_error: tuple[int, str] | None = None

    @property
    def healthy(self) -> bool:
        """Whether the ranks did the same, and nothing failed."""
        return not self.verdict


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _those_apart(calls: dict[int, Entry]) -> tuple[int, ...]:
    """Returns the ranks that are outvoted; none where there is no majority."""
    votes = Counter(entry.signature for entry in calls.values())
    (favourite, most), *others = votes.most_common()
    if others and others[0][1] == most:
        return ()
    return tuple(rank for rank, entry in calls.items() if entry.signature != favourite)


def _instead(dump: Dump, lane: Lane) -> str:
    """Says what a rank did last, where that was not what the others did."""
    last = dump.last()
    if last is None:
        return f"rank {dump.rank} has called nothing"
    where = "" if last.lane == lane.name else f" of group '{last.lane}'"
    what = "is in" if last.state in ("started", "scheduled") else "last called"
    text = f"rank {dump.rank} {what} {last.call}, seq {last.seq}{where}"
    return text + (f" ({last.sources[0]})" if last.sources else "")


def _missing(
    lane: Lane, seq: int, away: Sequence[int], there: dict[int, Entry], dumps: dict[int, Dump]
) -> str:
    call = next(iter(there.values())).call
    doing = "; ".join(_instead(dumps[rank], lane) for rank in away)
    came = "has not come" if len(away) == 1 else "have not come"
    return f"{_ranks(away)} {came} to {call}, seq {seq} of group '{lane.name}': {doing}"


def _reach(dump: Dump, lane: Lane) -> int | None:
    """Returns the first number that the rank's trace would still hold; None if it cannot be told."""
    entries = dump.entries.get(lane.name, {})
    if not dump.wrapped:
        return 1
    return min(entries) if entries else None


def _look(lane: Lane, dumps: dict[int, Dump]) -> Finding | None:
    reach = {rank: _reach(dumps[rank], lane) for rank in lane.ranks if rank in dumps}
    known = {rank: first for rank, first in reach.items() if first is not None}
    if not known:
        return None
    entries = {rank: dumps[rank].entries.get(lane.name, {}) for rank in known}
    last = {rank: max(found, default=0) for rank, found in entries.items()}
    # A rank whose call failed calls no more: that it is not there later says nothing.
    stopped = {rank for rank, seq in last.items() if seq and entries[rank][seq].state == "failed"}
    failure = None
    called = {seq for found in entries.values() for seq in found}
    for seq in sorted(seq for seq in called if seq >= max(known.values())):
        calls = {rank: found.get(seq) for rank, found in entries.items()}
        there = {rank: entry for rank, entry in calls.items() if entry is not None}
        if len({entry.signature for entry in there.values()}) > 1:
            apart = _those_apart(there)
            who = _ranks(apart) if apart else _ranks(sorted(there))
            differ = "differs from the others" if len(apart) == 1 else "differ"
            text = f"{who} {differ} at seq {seq} of group '{lane.name}'"
            return Finding(lane, seq, "mismatch", apart, text, dict(calls))
        away = tuple(rank for rank in calls if last[rank] < seq and rank not in stopped)
        # A message that was sent and taken needs nobody to wait for it.
        waits = any(entry.state != "completed" for entry in there.values())
        if away and (waits or lane.kind != "message"):
            text = _missing(lane, seq, away, there, dumps)
            return Finding(lane, seq, "missing", away, text, dict(calls))
        failed = [rank for rank, entry in there.items() if entry.state == "failed"]
        if failed and failure is None:
            call = there[failed[0]].call
            text = f"{call}, seq {seq} of group '{lane.name}', failed on {_ranks(sorted(failed))}"
            failure = Finding(lane, seq, "failed", (), text, dict(calls))
    return failure


def _first_error(dumps: dict[int, Dump]) -> tuple[int, str] | None:
    failed = [
        (entry.ended_ns, dump.rank, entry.error)
        for dump in dumps.values()
        for lane in dump.entries.values()
        for entry in lane.values()
        if entry.error
    ]
    return min(failed)[1:] if failed else None


def _conclude(report: Report) -> None:
    findings = [lane.finding for lane in report.lanes if lane.finding is not None]
    order = {"mismatch": 0, "missing": 1, "failed": 2}
    findings.sort(key=lambda finding: order[finding.kind])
    report.first_error = _first_error(report.dumps)
    if report.absent and (findings or report.first_error):
        gone = "it has died, or hangs where no group is"
        if len(report.absent) > 1:
            gone = "they have died, or hang where no group is"
        report.verdict.append(f"there is no dump of {_ranks(report.absent)}: {gone}")
    elif report.absent:
        report.verdict.append(
            f"there is no dump of {_ranks(report.absent)}, so nothing can be said of it"
        )
    report.verdict += [finding.text for finding in findings]
    if report.first_error and not report.verdict:
        rank, error = report.first_error
        report.verdict.append(
            f"a call failed on rank {rank}, and no other rank has to do with it: {error}"
        )
    worst = next((finding.guilty for finding in findings if finding.guilty), ())
    mismatch = bool(findings) and findings[0].kind == "mismatch"
    report.guilty = worst if mismatch else tuple(sorted({*report.absent, *worst}))


def analyse(dumps: Sequence[Dump]) -> Report:
    """Compares the dumps of the ranks of one job."""
    by_rank = {dump.rank: dump for dump in dumps}
    lanes = {name: lane for dump in dumps for name, lane in dump.lanes.items()}
    # A dump without entries of a lane does not know what kind it is.
    for dump in dumps:
        lanes |= {name: lane for name, lane in dump.lanes.items() if name in dump.entries}
    everyone = {rank for lane in lanes.values() for rank in lane.ranks}
    report = Report(by_rank, tuple(sorted(everyone - set(by_rank))))
    for lane in lanes.values():
        entries = {r: by_rank[r].entries.get(lane.name, {}) for r in lane.ranks if r in by_rank}
        completed = {
            rank: max((seq for seq, e in found.items() if e.state == "completed"), default=None)
            for rank, found in entries.items()
        }
        last = {rank: found[max(found)] if found else None for rank, found in entries.items()}
        report.lanes.append(LaneReport(lane, completed, last, _look(lane, by_rank)))
    _conclude(report)
    return report
