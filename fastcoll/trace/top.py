"""``fastcoll top PID``: the ranks of a job that runs or hangs, and which of them makes the others wait.

PID is the process of torchrun, or of a rank. The job needs no setting and is not disturbed: its traces are read from
memory. LOST is the share of the other ranks' time that they waited for this rank. Keys: q ends, p pauses, s sorts by
rank or by loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcoll.trace.dumps import program_lines
from fastcoll.trace.lateness import RankState, Waits
from fastcoll.trace.live import NoTraceError
from fastcoll.trace.processes import read_job

if TYPE_CHECKING:
    import curses

__all__ = ["main"]

_NEWEST = 500
"""Records of each rank that a repeated look reads; a single one reads all."""

_LONG = 1.0
"""Seconds after which a rank that has not arrived is shown first."""

_LOUD = 0.05
"""From this loss on, a rank is shown in color."""

_METRICS = {
    "fastcoll_rank_lost_ratio": (
        "lost",
        "Share of the other ranks' time that they waited for this rank.",
    ),
    "fastcoll_rank_bytes_per_second": ("bytes_per_second", "Bytes of tensors in calls that ended."),
    "fastcoll_rank_in_call": ("is_in_call", "1 while the rank is in a call."),
    "fastcoll_rank_state_seconds": (
        "seconds",
        "How long the rank has been in the call, or out of it.",
    ),
}


def _line_of(pid: int) -> str:
    """Returns the program's line that a process is at, if py-spy is installed here and may read it; else ""."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        said = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=5,
            check=True,
        )
        threads = json.loads(said.stdout)
        lines = [line for thread in threads for line in program_lines(thread["frames"])[:1]]
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        return ""
    return lines[0] if lines else ""


class _Job:
    """The job that is looked at."""

    def __init__(self, pids: Sequence[int], newest: int | None) -> None:
        self._pids = pids
        self._newest = newest
        self._waits = Waits()
        self._known: dict[int, RankState] = {}
        self._lines: dict[tuple[int, str, int], str] = {}
        self._lock = threading.Lock()

    def look(self) -> list[RankState]:
        """Returns all ranks that were ever seen; see ``read_job`` for its errors."""
        with self._lock:
            moment = time.monotonic_ns()
            found = self._waits.look(read_job(self._pids, self._newest), moment)
            missing = _missing(found)
            for state in found:
                if state.pid and state.rank in missing and not state.is_in_call:
                    state = replace(state, source=self._line(state))
                self._known[state.rank] = state
            return list(self._known.values())

    def _line(self, state: RankState) -> str:
        """Returns where a rank is that the others miss: its trace has only the line of its last call."""
        place = (state.pid, state.group, state.seq)
        if place not in self._lines:
            self._lines[place] = _line_of(state.pid) or state.source
        return self._lines[place]


def _state_of(state: RankState) -> str:
    if state.pid == 0:
        return "remote"
    try:
        letter = Path(f"/proc/{state.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    if letter in "Tt":
        return "stopped"
    if letter in "ZX":
        return "ended"
    return ("waits" if state.waits_for else "in call") if state.is_in_call else "outside"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _rate(bytes_per_second: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.1f} {unit}"
    return f"{bytes_per_second * 1e-3:.1f} kB/s"


def _missing(states: Sequence[RankState]) -> set[int]:
    """Returns the ranks that others have waited for some time."""
    return {rank for state in states for rank in state.waits_for if state.seconds >= _LONG}


def _order(states: Sequence[RankState], by_loss: bool) -> list[RankState]:
    """Ranks that others miss come first, then those that cost most."""
    missing = _missing(states)
    return sorted(
        states,
        key=lambda one: (one.rank not in missing, -one.lost, one.rank) if by_loss else one.rank,
    )


def _table(states: Sequence[RankState], width: int) -> list[str]:
    lines = [f"{'RANK':>4} {'PID':>8} {'LOST':>6} {'STATE':<7} {'SINCE':>8} {'MOVES':>9}  CALL"]
    for one in states:
        late = ""
        if one.waits_for:
            few = ", ".join(map(str, one.waits_for[:4])) + (" ..." if one.waits_for[4:] else "")
            late = f"for {few} in "
        call = f"{late}{one.call} #{one.seq}" if one.call else "no call yet"
        if one.pid == 0:
            call = "leads another host: run fastcoll top there"
        line = (
            f"{one.rank:>4} {one.pid or '-':>8} {100 * one.lost:>5.1f}% {_state_of(one):<7} "
            f"{_duration(one.seconds):>8} {_rate(one.bytes_per_second):>9}  {call}"
        )
        lines.append((line + (f"  {one.source}" if one.source else ""))[:width])
    return lines


def _prometheus(states: Sequence[RankState]) -> str:
    lines = []
    for name, (key, meaning) in _METRICS.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [
            f'{name}{{rank="{one.rank}",pid="{one.pid}"}} {float(getattr(one, key)):.9g}'
            for one in states
            if one.pid or key == "lost"
        ]
    return "\n".join(lines) + "\n"


def _serve(job: _Job, port: int) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, text = 200, _prometheus(job.look())
            except (OSError, ValueError) as error:
                status, text = 503, f"{error}\n"
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Metrics) as server:
        print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
        server.serve_forever()


def _to_file(job: _Job, path: Path, interval: float) -> None:
    while True:
        part = path.with_name(f".{path.name}.part")
        part.write_text(_prometheus(job.look()))
        part.replace(path)
        time.sleep(interval)


def _on_screen(screen: curses.window, job: _Job, title: str, interval: float) -> None:
    import curses

    curses.use_default_colors()
    with contextlib.suppress(curses.error):  # a terminal without a cursor that can be hidden
        curses.curs_set(0)
    for pair, color in enumerate((curses.COLOR_RED, curses.COLOR_YELLOW, curses.COLOR_GREEN), 1):
        curses.init_pair(pair, color, -1)
    screen.timeout(int(1000 * interval))
    paused, by_loss, states = False, True, job.look()
    while True:
        height, width = screen.getmaxyx()
        ordered = _order(states, by_loss)
        screen.erase()
        head = (
            f"{title}   {'paused' if paused else f'every {interval:g} s'}   q quit  p pause  s sort"
        )
        lines = [head, "", *_table(ordered, width - 1)]
        for row, line in enumerate(lines[:height]):
            look = curses.A_BOLD if row in (0, 2) else curses.A_NORMAL
            if row > 2:
                one = ordered[row - 3]
                waited = any(one.rank in other.waits_for for other in ordered)
                look = curses.color_pair(1 if waited else 2 if one.lost >= _LOUD else 3)
            with contextlib.suppress(curses.error):  # the last column of the last line
                screen.addnstr(row, 0, line, width - 1, look)
        screen.refresh()
        key = screen.getch()
        if key == ord("q"):
            return
        paused ^= key == ord("p")
        by_loss ^= key == ord("s")
        if not paused:
            states = job.look()


def _as_lines(job: _Job, as_json: bool, once: bool, interval: float) -> Iterator[str]:
    while True:
        states = _order(job.look(), True)
        yield (
            json.dumps([asdict(one) for one in states])
            if as_json
            else "\n".join(_table(states, 1 << 16))
        )
        if once:
            return
        time.sleep(interval)


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows the ranks until the job ends, and returns the exit status: 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(prog="fastcoll top", description=__doc__)
    parser.add_argument(
        "pid", type=int, nargs="+", help="torchrun or a rank of the job; or all of its ranks"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table of what the traces have, and end"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each table")
    parser.add_argument(
        "--prometheus",
        metavar="FILE|PORT",
        help="write Prometheus' text format to a file, or serve it at a local port",
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two tables (1)"
    )
    options = parser.parse_args(arguments)
    if options.interval <= 0:
        parser.error(f"--interval: expected seconds above 0, got {options.interval:g}")
    job = _Job(options.pid, None if options.once else _NEWEST)
    looked = False
    try:
        if options.prometheus is not None:
            job.look()  # an error now, not at the first request
            looked = True
            if options.prometheus.isdigit():
                _serve(job, int(options.prometheus))
            _to_file(job, Path(options.prometheus), options.interval)
        elif sys.stdout.isatty() and not (options.once or options.json):
            job.look()
            looked = True
            title = f"fastcoll top {' '.join(map(str, options.pid))} on {os.uname().nodename}"
            import curses  # not above: some builds of Python have none

            curses.wrapper(_on_screen, job, title, options.interval)
        else:
            for text in _as_lines(job, options.json, options.once, options.interval):
                print(text, flush=True)
                looked = True
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `fastcoll top PID | head`
        raise
    except (OSError, ValueError) as error:
        # A process that ends loses its files first.
        if looked and isinstance(error, (ProcessLookupError, NoTraceError)):
            print("fastcoll.top: the job has ended", file=sys.stderr)
            return 0
        print(f"fastcoll.top: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
