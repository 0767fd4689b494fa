"""Builds the dumps of ranks from calls, in the form of the flight recorder."""

from typing import Any

from fastcoll.trace.dumps import Dump, parse


def entry(seq: int, group: str = "0", **ours: Any) -> dict[str, Any]:
    """Return a completed all_reduce of float32[size], or with these fields."""
    completed = ours.get("state", "completed") == "completed"
    size, time = ours.pop("size", 4), ours.pop("time", 1000 * seq)
    return {
        "process_group": (group, "default_pg"),
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["float32"],
        "output_dtypes": ["float32"],
        "time_created_ns": time,
        "frames": ours.pop("frames", []),
        "fastcoll": {
            "group": group,
            "lane": "collective",
            "seq": seq,
            "name": "all_reduce",
            "state": "completed",
            "ended_ns": time + 500 if completed else None,
            "op": "SUM",
            "tensors_left_out": 0,
            **ours,
        },
    }


def dump(rank: int, entries: list[dict[str, Any]], world: int = 3, wrapped: bool = False) -> Dump:
    """Return the dump of a rank; of a trace of 100 calls, and 200 made, if it is wrapped."""
    groups = {e["process_group"][0] for e in entries} or {"0"}
    config = {"desc": "default_pg", "ranks": str(list(range(world)))}
    recorded = 200 if wrapped else len(entries)
    ours = {"rank": rank, "reason": "asked for", "host": "h", "pid": 1, "size": 100}
    return parse(
        {
            "entries": entries,
            "pg_config": dict.fromkeys(groups, config),
            "fastcoll": {**ours, "recorded": recorded},
        }
    )
