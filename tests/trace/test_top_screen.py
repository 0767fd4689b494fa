"""The screen of ``fastcoll top``: its keys, by a screen that keeps what is drawn."""

import curses

import pytest

from fastcoll.trace import top
from fastcoll.trace.lateness import RankState


class Screen:
    """Gives keys, -1 for none, and keeps the lines before each."""

    def __init__(self, keys: str) -> None:
        self.keys = [-1 if key == " " else ord(key) for key in keys]
        self.frames: list[list[str]] = []
        self.lines: list[str] = []

    def timeout(self, milliseconds):
        assert milliseconds == 500

    def getmaxyx(self):
        return 6, 120

    def erase(self):
        self.lines = []

    def addnstr(self, row, column, line, width, look):
        assert (row, column, width) == (len(self.lines), 0, 119)
        self.lines.append(line)

    def refresh(self):
        self.frames.append(self.lines)

    def getch(self):
        return self.keys.pop(0)


class Job:
    """Rank 1 costs more than rank 0, and each look finds another call."""

    looks = 0

    def look(self):
        self.looks += 1
        rest = ("all_reduce", "0", self.looks, "", False, 0.5, (), 0.0)
        return [RankState(rank, 4711, *rest, lost) for rank, lost in ((0, 0.1), (1, 0.4))]


@pytest.fixture
def frames(monkeypatch):
    monkeypatch.setattr(curses, "use_default_colors", lambda: None)
    monkeypatch.setattr(curses, "curs_set", lambda _: None)
    monkeypatch.setattr(curses, "init_pair", lambda *_: None)
    monkeypatch.setattr(curses, "color_pair", lambda pair: pair)

    def draw(keys: str) -> list[tuple[list[int], int, bool]]:
        """Press keys. Return, for each frame, the ranks in their order, the call, and whether it is paused."""
        screen = Screen(keys + "q")
        top._on_screen(screen, Job(), "a job", 0.5)
        assert screen.keys == []
        return [
            (
                [int(row.split()[0]) for row in rows],
                int(rows[0].rpartition("#")[2]),
                "paused" in head,
            )
            for head, _, _, *rows in screen.frames
        ]

    return draw


def test_each_frame_is_a_look(frames):
    assert frames("  ") == [([1, 0], 1, False), ([1, 0], 2, False), ([1, 0], 3, False)]


def test_s_sorts_by_rank_and_again_by_loss(frames):
    assert [ranks for ranks, _, _ in frames("ss")] == [[1, 0], [0, 1], [1, 0]]


def test_p_pauses_and_goes_on(frames):
    seen = [(call, paused) for _, call, paused in frames("p p ")]
    assert seen == [(1, False), (1, True), (1, True), (2, False), (3, False)]
