"""What gloo and fastcoll make of the same tests, compared and recorded."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

Outcome = dict[str, str]
"""The "outcome" of a test, and its "detail"."""


def first_error(detail: str) -> str:
    """Returns the line of a traceback that says what went wrong, without what changes by run."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Skip)\w*:", line)]
    told = ([line for line in errors if "exited with error code 10" not in line] or lines or [""])[
        -1
    ]
    told = re.sub(r"0x[0-9a-f]+|(?<![:/\w])/[\w./-]*/(?=[\w.-]+)|\bpid \d+", "", told)
    return told[:200]


def _passed(rounds: list[Outcome]) -> int:
    return sum(outcome["outcome"] == "passed" for outcome in rounds)


def _passes_most(rounds: list[Outcome]) -> bool:
    return 2 * _passed(rounds) > len(rounds)


@dataclasses.dataclass
class Pair:
    """The rounds of one test, at least one, on gloo and with fastcoll in its place."""

    gloo: list[Outcome]
    fastcoll: list[Outcome]

    @property
    def differs(self) -> bool:
        """Whether a round passed on gloo and one did not in its place."""
        return _passed(self.gloo) > 0 and _passed(self.fastcoll) < len(self.fastcoll)

    @property
    def worse(self) -> bool:
        """Whether gloo passes most rounds and fastcoll fails most."""
        return _passes_most(self.gloo) and not _passes_most(self.fastcoll)

    @property
    def detail(self) -> str:
        """What went wrong on fastcoll."""
        return next(o["detail"] for o in self.fastcoll if o["outcome"] != "passed")


class Comparison:
    """All tests of a run, by suite, as FILE::CLASS.TEST."""

    def __init__(self) -> None:
        self.suites: dict[str, dict[str, Pair]] = {}
        self.ended_early: dict[str, str] = {}

    def add(
        self,
        suite: str,
        file: str,
        gloo: tuple[dict[str, Outcome], str],
        fastcoll: tuple[dict[str, Outcome], str],
    ) -> dict[str, Pair]:
        """Takes one file's outcomes, with why it ended early; returns its tests that differ."""
        for _, told in (gloo, fastcoll):
            if told:
                self.ended_early[file] = first_error(told)
        added = {
            f"{file}::{test}": Pair(
                *(
                    [found.get(test, {"outcome": "not run", "detail": told})]
                    for found, told in (gloo, fastcoll)
                )
            )
            for test in gloo[0] | fastcoll[0]
        }
        self.suites.setdefault(suite, {}).update(added)
        return {name: pair for name, pair in added.items() if pair.differs}

    def counts(self, suite: str, backend: str) -> Counter[str]:
        """Returns how many tests of a suite passed, failed, were skipped or not run."""
        every = [getattr(pair, backend) for pair in self.suites[suite].values()]
        return Counter("passed" if _passes_most(r) else r[0]["outcome"] for r in every)

    def record(self, not_applicable: dict[str, str]) -> dict[str, Any]:
        """Returns what is written down: counts, every difference, and what could not be compared."""
        worse, unsteady, not_compared = {}, {}, {}
        for name, pair in (item for pairs in self.suites.values() for item in pairs.items()):
            if pair.differs:
                row = {
                    "gloo": f"{_passed(pair.gloo)}/{len(pair.gloo)}",
                    "fastcoll": f"{_passed(pair.fastcoll)}/{len(pair.fastcoll)}",
                    "error": first_error(pair.detail),
                }
                if name in not_applicable:
                    row["not_applicable"] = not_applicable[name]
                (worse if pair.worse else unsteady)[name] = row
            elif (pair.gloo[0]["outcome"], pair.fastcoll[0]["outcome"]) == ("not run", "failed"):
                not_compared[name] = first_error(pair.detail)
        return {
            "suites": [
                {"suite": suite, **{b: dict(self.counts(suite, b)) for b in ("gloo", "fastcoll")}}
                for suite in self.suites
            ],
            "fastcoll_fails": worse,
            "not_compared": not_compared,
            "unsteady": unsteady,
            "files_ended_early": self.ended_early,
        }
