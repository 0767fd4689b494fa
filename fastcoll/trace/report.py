"""Prints the result of ``fastcoll.trace.analysis``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from fastcoll.trace.analysis import Finding, LaneReport, Report

__all__ = ["as_json", "named_ranks", "print_report", "source_lines", "spans"]

_HEAD = ("rank", "last completed", "last called", "state", "call")


def spans(ranks: Sequence[int]) -> str:
    """Returns "0-3, 7" for the ranks 0, 1, 2, 3 and 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 7", or "ranks 0-3, 7"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def source_lines(sources: Sequence[str]) -> list[str]:
    """Returns the lines of a report for a call's place in the program, innermost first."""
    return [f"    {'from' if index else 'at'} {source}" for index, source in enumerate(sources)]


def _rows(lane: LaneReport) -> Iterator[tuple[str, ...]]:
    """Yields one row for all ranks that are at the same call."""
    same: dict[tuple[str, ...], list[int]] = {}
    for rank in lane.ranks:
        row: tuple[str, ...] = ("-", "-", "no dump", "")
        if rank in lane.entries:
            found = lane.entries[rank]
            done = max((seq for seq in found if found[seq]["state"] == "completed"), default="-")
            row = (str(done), "-", "", "nothing")
            if found:
                last = found[max(found)]
                row = (str(done), str(last["seq"]), last["state"], last["call"])
        same.setdefault(row, []).append(rank)
    for row, ranks in same.items():
        yield spans(ranks), *row


def _detail(finding: Finding) -> Iterator[str]:
    yield f"first difference: seq {finding.seq}, {finding.kind}"
    same: dict[tuple[str, ...], list[int]] = {}
    for rank, entry in finding.calls.items():
        said: tuple[str, ...] = ("did not make this call",)
        if entry is not None:
            said = (f"{entry['call']}, {entry['state']}", *entry["sources"])
            if finding.kind == "result" and entry["output_digest"] is not None:
                said = (f"{said[0]}, result {entry['output_digest']:016x}", *entry["sources"])
        same.setdefault(said, []).append(rank)
    for (call, *sources), ranks in same.items():
        yield f"  {named_ranks(ranks)}: {call}"
        yield from source_lines(sources)


def _closing(report: Report) -> Iterator[str]:
    messages = sum(lane.is_message for lane in report.lanes)
    if messages:
        yield f"messages between ranks: {messages} sequences (sender, receiver, tag) compared"
    yield from report.notes
    if report.healthy:
        yield "No divergence: all ranks made the same calls, and no call failed."
        return
    for sentence in report.verdict:
        yield f"- {sentence}"
    if report.first_error is not None:
        yield f"- the first error was on rank {report.first_error[0]}: {report.first_error[1]}"
    if report.guilty:
        yield f"Look at {named_ranks(report.guilty)} first."


def _lines(report: Report) -> Iterator[str]:
    reasons = "; ".join(sorted({dump.reason for dump in report.dumps.values()}))
    ranks = spans(list(report.dumps))
    yield (
        f"dumps of ranks {ranks} (written because: {reasons})" if reasons else f"ranks {ranks}, now"
    )
    for lane in report.lanes:
        if lane.is_message and lane.finding is None:
            continue
        yield f"\ngroup '{lane.name}' ({lane.description})"
        table = [_HEAD, *_rows(lane)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            yield f"  {line}".rstrip()
        for text in _detail(lane.finding) if lane.finding else ():
            yield f"  {text}"
    yield ""
    yield from _closing(report)


def print_report(report: Report, file: TextIO) -> None:
    """Prints the report for a person."""
    print(*_lines(report), sep="\n", file=file)


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report for programs."""
    return {
        "ranks": list(report.dumps),
        "absent": list(report.absent),
        "guilty": list(report.guilty),
        "verdict": report.verdict,
        "notes": report.notes,
        "first_error": report.first_error,
        "findings": [
            {
                "group": lane.name,
                "seq": lane.finding.seq,
                "kind": lane.finding.kind,
                "guilty": list(lane.finding.guilty),
                "calls": {
                    rank: None if entry is None else entry["call"]
                    for rank, entry in lane.finding.calls.items()
                },
            }
            for lane in report.lanes
            if lane.finding is not None
        ],
    }
