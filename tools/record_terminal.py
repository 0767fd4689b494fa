"""Makes pictures of terminals, of real runs of two examples, in docs/pictures.

top.svg has the tables of `fastcoll top` for examples/which_rank_is_slow.py, and against.svg what
`fastcoll trace --against` prints for examples/two_runs_that_differ.py. Type
``.venv/bin/python tools/record_terminal.py`` on an idle machine.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from pathlib import Path

from repository import ROOT

__all__ = ["main"]

_FRAMES = 6
_COLUMNS = 84
_CHARACTER, _LINE, _MARGIN = 8.4, 20, 16
_COLORS = {"text": "#c9d1d9", "marked": "#ff7b72", "prompt": "#7ee787", "page": "#0d1117"}
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def _tables() -> list[list[str]]:
    """Returns the tables that ``fastcoll top`` prints of its example."""
    script = ROOT / "examples" / "which_rank_is_slow.py"
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"
    with subprocess.Popen(
        [sys.executable, *torchrun, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()  # "training"
        time.sleep(2)
        with subprocess.Popen(
            [sys.executable, "-m", "fastcoll", "top", str(job.pid)],
            stdout=subprocess.PIPE,
            text=True,
        ) as top:
            assert top.stdout is not None
            frames = [[top.stdout.readline().rstrip() for _ in range(5)] for _ in range(_FRAMES)]
            top.terminate()
        job.terminate()
    return frames


def _comparison() -> list[str]:
    """Returns what ``fastcoll trace --against`` prints in its example."""
    script = ROOT / "examples" / "two_runs_that_differ.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    return done.stdout.replace(f"{ROOT}/", "").splitlines()


def _text(row: int, line: str, color: str) -> str:
    y = _MARGIN + _LINE * (row + 1) - 5
    return f'<text x="{_MARGIN}" y="{y}" fill="{color}" xml:space="preserve">{html.escape(line[:_COLUMNS])}</text>'


def _drawn(title: str, command: str, frames: list[list[str]], marked: str) -> str:
    """Returns the picture, with the frames in turns. Lines that match `marked` have a color."""
    width = int(2 * _MARGIN + _CHARACTER * _COLUMNS)
    height = 2 * _MARGIN + _LINE * (1 + len(frames[0]))
    groups = []
    for number, lines in enumerate(frames):
        shown = ";".join("1" if number == other else "0" for other in range(len(frames)))
        rows = [
            _text(row + 1, line, _COLORS["marked" if re.search(marked, line) else "text"])
            for row, line in enumerate(lines)
        ]
        animation = (
            ""
            if len(frames) == 1
            else (
                f'<animate attributeName="opacity" values="{shown}" calcMode="discrete" dur="{len(frames)}s" '
                'repeatCount="indefinite"/>'
            )
        )
        groups.append(f'<g opacity="{int(number == 0)}">{animation}{"".join(rows)}</g>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{_FONT}" font-size="14">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{_COLORS["page"]}"/>',
        _text(0, f"$ {command}", _COLORS["prompt"]),
        *groups,
        "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    """Runs the examples, and writes the pictures."""
    pictures = Path(ROOT / "docs" / "pictures")
    title = "fastcoll trace --against shows the first call that differs between two runs, on rank 2"
    command = "fastcoll trace --against one/rank_ other/rank_"
    drawn = _drawn(title, command, [_comparison()], "^first|rank 2 differs")
    (pictures / "against.svg").write_text(drawn)
    title = "fastcoll top shows that rank 2 makes the others wait"
    (pictures / "top.svg").write_text(_drawn(title, "fastcoll top 4711", _tables(), "^ +2 "))


if __name__ == "__main__":
    main()
