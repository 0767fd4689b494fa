"""Which rank makes the others wait: by the times at which the ranks of a host arrive in each call.

The ranks of a host share a clock, and their traces have the time at which each call began, or was issued to a device.
In a collective all ranks wait for the last one, and a receiver waits for the sender: this time is lost to the rank
that comes last. The job measures nothing for it. If it makes more calls between two looks than the traces keep, the
kept calls represent all. Hosts do not share a clock: the leader of a host counts what it waits for each other leader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from fastcoll.trace.contents import LANES, Record, Trace
from fastcoll.trace.dumps import program_lines
from fastcoll.trace.flight_recorder import frames_of, lane_of

__all__ = ["RankState", "Waits"]


@dataclass(frozen=True)
class RankState:
    """What a rank does, and what it has cost the others.

    Attributes:
        rank: Rank in the whole job.
        pid: Its process; 0: it is the leader of another host, of which only ``seconds`` and ``lost`` are known.
        call: Its first call that has not ended, or else its last one: "all_reduce float32[1000]"; "" if it made none.
        group: The group of the call.
        seq: The number of the call in its group.
        source: The line of the program that made the call, if stacks are recorded; else "".
        is_in_call: Whether the call has not ended.
        seconds: How long the rank has been in the call, or out of it; how long the present wait for another host is.
        waits_for: Ranks that have not arrived in the call, and leaders of hosts whose data has not.
        bytes_per_second: Bytes of its tensors in calls that ended, in the time that was seen.
        lost: The share of the other ranks' time that they waited for this one, in the time that was seen, from 0 to 1.
    """

    rank: int
    pid: int
    call: str = ""
    group: str = ""
    seq: int = 0
    source: str = ""
    is_in_call: bool = False
    seconds: float = 0.0
    waits_for: tuple[int, ...] = ()
    bytes_per_second: float = 0.0
    lost: float = 0.0


@dataclass
class _Look:
    """What was seen between two times, in ticks; by rank."""

    begin: int
    end: int
    lost: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)

    def add_wait(self, begin: int, end: int, late: int) -> None:
        """Adds a rank's wait for another one, as far as it lies in this time."""
        waited = min(end, self.end) - max(begin, self.begin)
        self.lost[late] = self.lost.get(late, 0) + max(waited, 0)


class Waits:
    """Looks at the traces of a host's ranks, once or again and again.

    Args:
        looks: Over how many of the last looks shares and rates are taken.
    """

    def __init__(self, looks: int = 10) -> None:
        self._most = looks
        self._looks: list[_Look] = []
        self._newest: dict[int, int] = {}  # the last record that was seen, by rank
        self._waited: dict[tuple[int, int], int] = {}  # for other hosts, in ticks, by the two ranks

    def look(self, traces: Sequence[Trace], moment: int) -> list[RankState]:
        """Returns the state of each rank at a moment, by rank; then that of the leaders of other hosts.

        Args:
            traces: Traces of the ranks of a host, which share their clock.
            moment: The time before the first of them was read, in nanoseconds of CLOCK_MONOTONIC. What came later is
                left out, because the traces are read one after the other.
        """
        clock = max(traces, key=lambda trace: trace.ticks)
        now = clock.ticks + int((moment - clock.nanos) / clock.rate)
        traces = [
            replace(
                trace,
                records=[
                    record if record.ended <= now else record._replace(ended=0)
                    for record in trace.records
                    if record.created <= now
                ],
            )
            for trace in traces
        ]
        look = _Look(self._begin(traces, now), now)
        waits_for: dict[tuple[int, int], list[int]] = {}
        for calls in _matched(traces):
            _count(calls, look, waits_for)
        for trace in traces:
            look.bytes[trace.rank] = sum(
                _bytes(record, trace) for record in trace.records if record.ended > look.begin
            )
        hosts = self._count_hosts(traces, look, now)
        self._looks = [*self._looks, look][-self._most :]
        self._newest = {trace.rank: trace.records[-1].id for trace in traces if trace.records}
        return [
            *(self._state(trace, waits_for, now, len(traces) - 1) for trace in traces),
            *(
                RankState(leader, 0, seconds=seconds, **self._shares(leader, len(traces)))
                for leader, seconds in hosts
            ),
        ]

    def _count_hosts(
        self, traces: Sequence[Trace], look: _Look, now: int
    ) -> list[tuple[int, float]]:
        """Adds the waits for hosts whose leader is not traced; returns each with the seconds of the present one."""
        waits: dict[int, float] = {}
        traced = {trace.rank for trace in traces}
        for trace in traces:
            for leader, host in trace.hosts.items():
                if leader in traced:
                    continue
                present = max(now - host.since, 0) if host.since else 0
                total = host.ticks + present * host.ranks
                before = self._waited.get((trace.rank, leader))
                if before is None:  # the share of the whole time stands for this one
                    before = total - int(
                        total * (look.end - look.begin) / max(now - trace.first, 1)
                    )
                self._waited[trace.rank, leader] = total
                look.lost[leader] = look.lost.get(leader, 0) + max(total - before, 0)
                waits[leader] = max(waits.get(leader, 0.0), present * trace.rate * 1e-9)
        return sorted(waits.items())

    def _shares(self, rank: int, others: int, rate: float = 1.0) -> dict[str, Any]:
        """Returns a rank's bytes a second, and the share of the others' time that they lost to it, by name."""
        seen = max(sum(look.end - look.begin for look in self._looks), 1)
        lost = sum(look.lost.get(rank, 0) for look in self._looks)
        moved = sum(look.bytes.get(rank, 0) for look in self._looks)
        lost_share = min(lost / seen / max(others, 1), 1.0)
        return {"bytes_per_second": moved / (seen * rate) * 1e9, "lost": lost_share}

    def _begin(self, traces: Sequence[Trace], now: int) -> int:
        """Returns the time from which all traces have their calls, and that was not seen yet."""
        begin = self._looks[-1].end if self._looks else 0
        for trace in traces:
            missed = trace.records and trace.records[0].id > self._newest.get(trace.rank, 0) + 1
            if trace.records and (missed or not self._looks):
                begin = max(begin, trace.records[0].created)
        return min(begin or now, now)

    def _state(
        self, trace: Trace, waits_for: dict[tuple[int, int], list[int]], now: int, others: int
    ) -> RankState:
        under_way = (record for record in trace.records if record.ended == 0)
        record = next(under_way, trace.records[-1] if trace.records else None)
        rates = self._shares(trace.rank, others, trace.rate)
        if record is None:
            return RankState(trace.rank, trace.pid, **rates)
        group = trace.groups.get(record.group)
        is_in_call = record.ended == 0
        absent = [leader for leader, host in trace.hosts.items() if host.since and is_in_call]
        return RankState(
            trace.rank,
            trace.pid,
            _text(record, trace),
            "" if group is None else group.name,
            record.seq,
            next(iter(program_lines(frames_of(trace.stacks.get(record.stack, "")))), ""),
            is_in_call,
            (now - (record.ended or record.created)) * trace.rate * 1e-9,
            tuple(sorted([*waits_for.get((trace.rank, record.id), ()), *absent])),
            **rates,
        )


def _matched(traces: Sequence[Trace]) -> Iterator[dict[int, Record | None]]:
    """Yields each call as all ranks made it, by rank in the job; None for a rank of this host that has not come."""
    lanes: dict[str, tuple[list[int], dict[int, dict[int, Record]]]] = {}
    for trace in traces:
        for record in trace.records:
            group = trace.groups.get(record.group)
            if group is not None:
                name, ranks = lane_of(record, group)
                lanes.setdefault(name, (ranks, {}))[1].setdefault(record.seq, {})[trace.rank] = (
                    record
                )
    traced = {trace.rank for trace in traces}
    for ranks, calls in lanes.values():
        here = traced.intersection(ranks)
        last = {
            rank: max((seq for seq, made in calls.items() if rank in made), default=0)
            for rank in here
        }
        for seq, made in calls.items():
            # A rank whose record was overwritten is not late.
            if all(rank in made or last[rank] < seq for rank in here):
                yield {rank: made.get(rank) for rank in here}


def _count(
    calls: dict[int, Record | None], look: _Look, waits_for: dict[tuple[int, int], list[int]]
) -> None:
    """Adds what the ranks that made a call waited for the last one, or wait for those that have not come."""
    made = {rank: record for rank, record in calls.items() if record is not None}
    late = [rank for rank in calls if rank not in made]
    if len(calls) < 2 or (
        not late and all(0 < record.ended <= look.begin for record in made.values())
    ):
        return
    # A call on the CPU may first wait for earlier ones of this rank.
    arrived = {
        rank: record.created if record.device else record.started for rank, record in made.items()
    }
    if not all(arrived.values()):
        return
    last = max(arrived, key=arrived.__getitem__)
    end = look.end if late else arrived[last]
    for rank, record in made.items():
        if late and not record.ended:
            waits_for[rank, record.id] = late
        for other in late or [last]:
            # A root or a sender may go on before the others come.
            look.add_wait(arrived[rank], min(end, record.ended or end), other)


def _shapes(record: Record) -> list[tuple[int, list[int]]]:
    """Returns the larger side's tensors: inputs or outputs."""
    return max(record.shapes(), key=lambda side: sum(prod(sizes) for _, sizes in side))


def _bytes(record: Record, trace: Trace) -> int:
    return sum(prod(sizes) * trace.names.bytes[dtype] for dtype, sizes in _shapes(record))


def _text(record: Record, trace: Trace) -> str:
    name, tensors = trace.names.calls[record.call], _shapes(record)
    if LANES[record.lane] == "message" and record.peer >= 0:
        name += f" {'to' if record.sends else 'from'} {record.peer}"
    if not tensors:
        return name
    dtype, sizes = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{name} {trace.names.dtypes[dtype]}{sizes}{more}"
