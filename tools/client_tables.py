"""The tables of frameworks whose trainings were run on Gloo and on fastcoll: tests/clients makes their record."""

from __future__ import annotations

from typing import Any

from table_sources import record_of, source

from fastcoll.bench.table import markdown

__all__ = ["client_result", "clients", "frameworks"]


def clients() -> list[str]:
    """Returns the table of all frameworks, with versions, losses and source."""
    name = "clients_cpu.jsonl"
    record, rows = record_of(name), []
    for client in record["cases"]:
        for ranks, case in client["ranks"].items():
            if not case.get("agrees"):
                raise ValueError(f"{name}: {client['title']}, {ranks} ranks: {client_result(case)}")
            versions = ", ".join(f"{one} {version}" for one, version in case["versions"].items())
            loss = f"{float.fromhex(case['final_loss']['fastcoll']):.6f}"
            gloo, ours, ratio = _step_times(case)
            row = [client["title"], ratio, ranks, gloo, ours, loss, _losses(case)]
            rows.append([*row, f"`{client['setting']}`", versions])
    head = (
        "client | gloo / fastcoll | ranks | gloo, ms | fastcoll, ms | final loss, fastcoll | losses of all steps | "
        "setting | version"
    )
    dates = sorted(client["date"] for client in record["cases"])
    rounds = sorted({client["rounds"] for client in record["cases"]})
    when = f"Started from {dates[0][:16]} to {dates[-1][:16]}, {'/'.join(map(str, rounds))} rounds."
    return [*markdown(head, rows), *source((name, record), more=f"; {when}")]


def _step_times(case: dict[str, Any]) -> list[str]:
    times = [f"{case['step_seconds'][name]['median'] * 1e3:.1f}" for name in ("gloo", "fastcoll")]
    return [*times, f"{case['ratio']:.2f}x"]


def _losses(case: dict[str, Any]) -> str:
    if case["same_bits"]:
        return "gloo's bits"
    text = f"within {case['difference']:.1e} of gloo's"
    return text if case["agrees"] else f"DIFFER: {text}, {case['bound']:.1e} allowed"


def client_result(case: dict[str, Any]) -> str:
    """Returns the step times and losses of a framework's training in one line."""
    if "problem" in case:
        return f"FAILED: {case['problem']}"
    gloo, ours, ratio = _step_times(case)
    return f"gloo {gloo} ms, fastcoll {ours} ms, {ratio}; {_losses(case)}"


# Chosen by popularity, before anything was measured.
_FRAMEWORKS = ("ddp", "fsdp2", "trainer", "lightning")


def frameworks() -> list[str]:
    """Returns the short table of the best-known frameworks on 2 ranks."""
    known = {one["client"]: one for one in record_of("clients_cpu.jsonl")["cases"]}
    rows = []
    for client in (known[name] for name in _FRAMEWORKS):
        case = client["ranks"]["2"]
        if not case["same_bits"]:
            raise ValueError(f"{client['title']}: expected Gloo's losses, got {_losses(case)}")
        gloo, ours, ratio = _step_times(case)
        rows.append([client["title"], ratio, gloo, ours, f"`{client['setting']}`"])
    return markdown("framework | speed-up | Gloo, ms | fastcoll, ms | how to switch", rows)
