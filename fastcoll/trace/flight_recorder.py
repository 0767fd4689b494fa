"""A trace in the format of torch's flight recorder, version 2.10, which ``torchfrtrace`` reads.

A dict of our own, "fastcoll", in the whole and in each entry holds what that format cannot express. The differences:

- Its reader accepts known libraries only. "gloo:" stands for calls on the CPU, "nccl:" for calls on a device.
  ``fastcoll.info.groups`` reports what really moved the bytes.
- It expects all ranks of a group in every sequence number, but a message has two ranks. Here the messages from one rank
  to another with one tag are a group of their own.
- A failed call keeps its state there, "started" or "scheduled". Our dict has the error.
"""

from __future__ import annotations

import re
from typing import Any

from fastcoll.trace.contents import LANES, STATES, Group, Record, Trace

__all__ = ["flight_recorder", "frames_of", "lane_of"]


def _ends(record: Record, group: Group) -> tuple[int, int]:
    """Returns sender and receiver of a message, in ranks of the group; -1 while a receiver has found none."""
    return (group.rank, record.peer) if record.sends else (record.peer, group.rank)


def lane_of(record: Record, group: Group) -> tuple[str, list[int]]:
    """Returns name and ranks of the sequence that the record's number belongs to."""
    lane = LANES[record.lane]
    if lane != "message":
        ending = {"device": " on device", "monitored_barrier": " monitored_barrier"}.get(lane, "")
        return group.name + ending, group.ranks
    sender, receiver = _ends(record, group)
    if sender < 0:
        return f"{group.name} recv from any rank tag {record.tag}", [group.ranks[receiver]]
    name = f"{group.name} send {sender}->{receiver} tag {record.tag}"
    return name + (" on device" if record.device else ""), sorted(
        (group.ranks[sender], group.ranks[receiver])
    )


def _operation(record: Record, group: Group, name: str) -> str:
    """Returns "all_reduce", or "send 0->1" in ranks of the message's own group."""
    if LANES[record.lane] != "message":
        return name
    sender, receiver = _ends(record, group)
    if sender < 0:
        return "recv 0<-0"  # it has no sender, so it is a group of one
    source = 0 if group.ranks[sender] < group.ranks[receiver] else 1
    return f"send {source}->{1 - source}" if record.sends else f"recv {1 - source}<-{source}"


def frames_of(stack: str) -> list[dict[str, Any]]:
    """Returns the frames of a stack's text, innermost first."""
    parts = [line.split("\t") for line in stack.splitlines()]
    return [
        {"name": part[0], "filename": "\t".join(part[1:-1]), "line": int(part[-1])}
        for part in parts
        if len(part) > 2 and re.fullmatch(r"[0-9]{1,9}", part[-1])
    ]


def _entry(trace: Trace, record: Record, group: Group) -> dict[str, Any]:
    def moment(ticks: int) -> int | None:
        return trace.wall_of(ticks) if ticks else None

    names, state, lane = trace.names, STATES[record.state], LANES[record.lane]
    name, is_message = names.calls[record.call], lane == "message"
    completed, began = state == "completed", record.started != 0
    inputs, outputs = record.shapes()
    ours: dict[str, Any] = {
        "group": group.name,
        "lane": lane,
        "seq": record.seq,
        "name": name,
        "state": state,
        "ended_ns": moment(record.ended),
        "tensors_left_out": record.inputs + record.outputs - len(inputs) - len(outputs),
    }
    if names.ops[record.op] != "-":
        ours["op"] = names.ops[record.op]
    if record.root >= 0:
        ours["root"] = record.root
    if is_message:
        sender, receiver = _ends(record, group)
        ours |= {"sends": record.sends, "tag": record.tag, "from": sender, "to": receiver}
    for key in ("input_digest", "output_digest"):
        if getattr(record, key):
            ours[key] = getattr(record, key)
    if record.id in trace.errors:
        ours["error"] = trace.errors[record.id]
    entry = {
        "record_id": record.id,
        "pg_id": record.group,
        "process_group": (lane_of(record, group)[0], group.description),
        "collective_seq_id": record.seq,
        "p2p_seq_id": record.seq if is_message else 0,
        "op_id": record.seq,
        "profiling_name": f"{'nccl' if record.device else 'gloo'}:{_operation(record, group, name)}",
        "input_sizes": [sizes for _, sizes in inputs],
        "input_dtypes": [names.dtypes[dtype] for dtype, _ in inputs],
        "output_sizes": [sizes for _, sizes in outputs],
        "output_dtypes": [names.dtypes[dtype] for dtype, _ in outputs],
        "time_created_ns": trace.wall_of(record.created),
        "time_discovered_started_ns": moment(record.started),
        "time_discovered_completed_ns": moment(record.ended) if completed else None,
        "state": "completed" if completed else "started" if began else "scheduled",
        "retired": record.ended != 0,
        "timeout_ms": record.timeout_ms,
        "is_p2p": is_message,
        "frames": frames_of(trace.stacks.get(record.stack, "")),
        "fastcoll": ours,
    }
    if completed and began:
        entry["duration_ms"] = (record.ended - record.started) * trace.rate * 1e-6
    return entry


def flight_recorder(trace: Trace) -> dict[str, Any]:
    """Returns the keys "version", "pg_config", "pg_status", "entries" and "fastcoll"."""
    # Groups whose records are all overwritten too: their ranks may wait for this one.
    lanes = {group.name: (group.description, group.ranks) for group in trace.groups.values()}
    status: dict[str, dict[str, int]] = {}
    entries, lost = [], 0
    for record in trace.records:
        group = trace.groups.get(record.group)
        if group is None:
            lost += 1
            continue
        name, ranks = lane_of(record, group)
        lanes.setdefault(name, (group.description, ranks))
        reached = status.setdefault(name, {})
        entries.append(_entry(trace, record, group))
        for step, is_there in (
            ("enqueued", True),
            ("started", record.started != 0),
            ("completed", STATES[record.state] == "completed"),
        ):
            if is_there:
                reached[step] = max(reached.get(step, 0), record.seq)
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in sorted(lanes.items())
        },
        "pg_status": {
            name: {
                f"last_{step}_collective": str(status.get(name, {}).get(step, 0))
                for step in ("enqueued", "started", "completed")
            }
            for name in sorted(lanes)
        },
        "entries": entries,
        "fastcoll": {
            "version": trace.version,
            "reason": trace.reason,
            "rank": trace.rank,
            "host": trace.host,
            "pid": trace.pid,
            "time_ns": trace.wall,
            "size": trace.kept,
            "recorded": trace.recorded,
            "unreadable": lost,
            "stacks": trace.with_stacks,
        },
    }
