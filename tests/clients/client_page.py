"""The table of docs/integrations.md, from the record of ``make clients``."""

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RECORD", "rewritten", "told", "write"]

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "integrations.md"
RECORD = _ROOT / "bench" / "results" / "clients_cpu.json"
_TABLE = re.compile(r"(<!-- table clients -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = (
    *("client", "version", "setting", "ranks", "gloo, ms", "fastcoll, ms", "gloo / fastcoll"),
    *("final loss, fastcoll", "losses of all steps"),
)


def told(case: dict[str, Any]) -> str:
    """Return what a case says in a line."""
    times = ", ".join(
        f"{name} {one['median'] * 1e3:.1f} ms" for name, one in case["step_seconds"].items()
    )
    return f"{times}, {case['ratio']:.2f}x; {_losses(case)}"


def _losses(case: dict[str, Any]) -> str:
    if case["same_bits"]:
        return "gloo's bits"
    text = f"within {case['difference']:.1e} of gloo's"
    return text if case["agrees"] else f"DIFFER: {text}, {case['bound']:.1e} allowed"


def _row(entry: dict[str, Any], ranks: str, case: dict[str, Any]) -> list[str]:
    setting = f"`{entry['setting']}`"
    if "problem" in case:
        return [
            entry["title"],
            "-",
            setting,
            ranks,
            "-",
            "-",
            "-",
            "-",
            f"FAILED: {case['problem']}",
        ]
    versions = ", ".join(f"{name} {version}" for name, version in case["versions"].items())
    times = [f"{case['step_seconds'][name]['median'] * 1e3:.1f}" for name in ("gloo", "fastcoll")]
    loss = f"{float.fromhex(case['final_loss']['fastcoll']):.6f}"
    ratio = f"{case['ratio']:.2f}x"
    return [entry["title"], versions, setting, ranks, *times, ratio, loss, _losses(case)]


def recorded() -> dict[str, Any] | None:
    """Return the record, None if there is none yet."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def rewritten(text: str, record: dict[str, Any] | None) -> str:
    """Return a page with its table made anew; ValueError if it has not exactly one."""
    if (count := len(_TABLE.findall(text))) != 1:
        raise ValueError(
            f"expected one table between '<!-- table clients -->' and end, got {count}"
        )
    if record is None:
        none = "No run is recorded yet. `make clients` makes one, and this table."
        return _TABLE.sub(lambda match: f"{match[1]}\n{none}\n\n{match[2]}", text)
    rows = [
        _row(entry, ranks, case)
        for entry in record["clients"].values()
        for ranks, case in entry["ranks"].items()
    ]
    rule = ["---" if column < 3 else "--:" for column in range(len(_HEAD))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (_HEAD, rule, *rows)]
    machine = record["machine"]
    where = f"{machine['cpu']}, {machine['cores_allowed']} cores"
    source = f"[{RECORD.name}](../bench/results/{RECORD.name}), {record['date'][:10]}; {where}"
    lines += ["", f"`{record['command']}`  ", source]
    return _TABLE.sub(lambda match: match[1] + "\n" + "\n".join(lines) + "\n\n" + match[2], text)


def write() -> None:
    """Write the page's table anew."""
    PAGE.write_text(rewritten(PAGE.read_text(), recorded()))
