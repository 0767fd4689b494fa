"""Plays the tests of the listed faults with several backends, and prints what came of each fault.

    FAULTS="--backend fastcoll,gloo --faults 1-11,23 --kills 200 --json FILE" .ci/run faults

Each backend has a run of pytest of its own, of the tests that are marked with a fault's number (tests/fault_list.py),
in which this module is a plugin. The first test of a fault that is not as wanted decides, and the fault's other tests
are not run: a backend that hangs does so in each. Other backends do not play what only fastcoll has. The exit status
is 1 if fastcoll fails one.
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_list import FAULTS, OF_FASTCOLL_ALONE
from in_time import TooSlow, notes
from ranks import RanksFailed
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parents[1]
FILE, CHOSEN = "FASTCOLL_FAULTS_FILE", "FASTCOLL_FAULTS"

VERDICTS = (
    "as wanted",
    "not played",  # the machine or the backend has no room for the fault
    "not as wanted",  # an error that does not name what it should, or another one
    "too slow",
    "left behind",
    "wrong result",  # or success where there should have been an error
    "hang",
    "crash",
)
"""From good to bad."""

DECIDED = "the fault has its verdict"


# --- in pytest -----------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the chosen faults, in order."""
    chosen = set(json.loads(os.environ[CHOSEN]))
    kept = [item for item in items if (number := _number(item)) and number in chosen]
    for item in kept:
        # What gloo cannot do is played all the same; what it has none of, as a whole module says, is not.
        item.own_markers = [mark for mark in item.own_markers if not _beyond(mark)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: _number(item) or 0)


decided: set[int | None] = set()
"""Faults of which a test was not as wanted."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what can change nothing."""
    if _number(item) in decided:
        pytest.skip(DECIDED)


def _number(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("fault")
    return mark.args[0] if mark else None


def _beyond(mark: pytest.Mark) -> bool:
    reason = mark.kwargs["reason"] if mark.name == "skipif" else ""
    return reason.startswith("beyond gloo") and not reason.endswith("chooses by itself")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Any:
    report = yield
    if call.when == "setup":
        notes.clear()
    found = verdict(call)
    if _number(item) in decided:
        return report
    if found not in VERDICTS[:2]:
        decided.add(_number(item))
    if found != "as wanted" or call.when == "call":
        seconds, text = max(notes, default=(None, ""))
        if call.excinfo and not (found in ("not as wanted", "too slow") and text):
            text = str(call.excinfo.value)
        line = {
            "fault": _number(item),
            "test": item.nodeid.removeprefix("tests/"),
            "verdict": found,
            "seconds": None if seconds is None else round(seconds, 4),
            "detail": shortened(impersonal(text)),
            "took": round(call.duration, 2),
        }
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(line) + "\n")
    return report


def verdict(call: "pytest.CallInfo[None]") -> str:
    """Say what came of a phase of a test."""
    if call.excinfo is None:
        return "as wanted"
    error = call.excinfo.value
    if isinstance(error, pytest.skip.Exception):
        return "not played"
    if isinstance(error, TooSlow):
        return "too slow"
    text = str(error)
    if isinstance(error, RanksFailed) and error.how in ("silent", "ended"):
        return "hang" if error.how == "silent" else "crash"
    if call.when == "teardown":
        return "left behind"
    if "wrong result" in text or "success was reported" in text:
        return "wrong result"
    return "not as wanted"


def shortened(text: str, most: int = 600) -> str:
    """Return the text without its middle if it is long: a traceback says at its end what happened."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def impersonal(text: str) -> str:
    """Return the text without what is of this machine: its name, and where things lie on it."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "h1", text)
    text = text.replace(str(TESTS.parent), ".").replace(sys.base_prefix, "python")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*?/", "", text)


# --- `.ci/run faults` -------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Read "1-11,23": the numbers of faults."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected faults as 1-11,23, got {part!r}") from None
    if unknown := set(found) - FAULTS.keys():
        raise argparse.ArgumentTypeError(f"there are no faults {sorted(unknown)}")
    return found


def played(backend: str, chosen: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Play the tests with one backend; return what came of each."""
    chosen = [
        number for number in chosen if backend == "fastcoll" or number not in OF_FASTCOLL_ALONE
    ]
    if not chosen:
        return []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        file = Path(folder) / "found.jsonl"
        file.touch()
        environment = {
            **os.environ,
            "FASTCOLL_TEST_BACKEND": backend,
            "FASTCOLL_TEST_SLACK": "1",  # here promises are measured
            "FASTCOLL_TEST_KILLS": str(options.kills),
            FILE: str(file),
            CHOSEN: json.dumps(chosen),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "fault_table", "--timeout=0"]
        command += ["-rfE", "--no-header", "--tb=no", "-m", "fault", str(TESTS)]
        done = subprocess.run(command, env=environment, cwd=TESTS.parent, check=False)
        if done.returncode not in (0, 1):  # 1: a test has failed
            raise SystemExit(f"pytest ended with {done.returncode}")
        return [json.loads(line) for line in file.read_text().splitlines()]


def worst(outcomes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst of a fault's outcomes that were played, of equals the slowest, and the time of all."""
    every = list(outcomes)
    listed = [one for one in every if one["verdict"] != "not played"] or every
    found = max(listed, key=lambda o: (VERDICTS.index(o["verdict"]), o["seconds"] or 0.0))
    return {**found, "took": round(sum(one["took"] for one in every), 2)}


def cases(found: dict[str, list[dict[str, Any]]], chosen: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what the record has of each fault."""
    for number in chosen:
        case: dict[str, Any] = dict(zip(("fault", "wanted"), FAULTS[number], strict=True))
        case = {"row": number, **case, "backends": {}}
        for backend, outcomes in found.items():
            if backend != "fastcoll" and number in OF_FASTCOLL_ALONE:
                continue
            mine = [one for one in outcomes if one["fault"] == number]
            assert mine, f"no test of fault {number} was collected with {backend}"
            case["backends"][backend] = {k: v for k, v in worst(mine).items() if k != "fault"}
        yield case


def table(listed: list[dict[str, Any]], backends: list[str]) -> Table:
    """Return the outcomes as a table."""
    made = Table(title="faults")
    for column in ("", "fault", "wanted", *backends):
        made.add_column(column, overflow="fold")
    for case in listed:
        cells = [_cell(case["backends"].get(backend)) for backend in backends]
        made.add_row(str(case["row"]), case["fault"], case["wanted"], *cells)
    return made


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "[dim]-[/]"
    color = {"as wanted": "green", "not played": "dim"}.get(found["verdict"], "red")
    seconds = "" if found["seconds"] is None else f" {found['seconds']:.3g} s"
    return f"[{color}]{found['verdict']}[/]{seconds}"


def main(arguments: list[str] | None = None) -> int:
    """Play, print, write; return the exit status."""
    from fastcoll.bench.conditions import describe_run
    from fastcoll.bench.record import write_record

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="fastcoll,gloo", help="names, with commas between")
    parser.add_argument("--faults", type=numbers, default=list(FAULTS), help="as 1-11,23")
    parser.add_argument("--kills", type=int, default=20, help="of fault 4, at random moments")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    backends = options.backend.split(",")
    found = {backend: played(backend, options.faults, options) for backend in backends}
    listed = list(cases(found, options.faults))
    console = Console(width=150)
    console.print(table(listed, backends))
    for backend in backends:
        mine = [case["backends"].get(backend) for case in listed]
        verdicts = [each["verdict"] for each in mine if each]
        counts = {text: verdicts.count(text) for text in VERDICTS if text in verdicts}
        console.print(f"{backend}: " + ", ".join(f"{n} {text}" for text, n in counts.items()))
    if options.json:
        words = sys.argv[1:] if arguments is None else arguments
        command = f"FAULTS={shlex.quote(shlex.join(words))} .ci/run faults"
        write_record(options.json, {**describe_run(command), "cases": listed})
    mine = [case["backends"].get("fastcoll") for case in listed]
    return int(any(f and f["verdict"] not in VERDICTS[:2] for f in mine))


if __name__ == "__main__":
    sys.exit(main())
