"""What gloo and fastcoll make of the same tests, compared and recorded."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from torch_suites.runs import FileOutcomes

__all__ = ["Comparison", "Pair", "first_error"]

Outcome = dict[str, Any]
_NOT_RUN = "not run"


def first_error(detail: str) -> str:
    """Returns the line of a traceback that says what went wrong, without what changes by run."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Skip)\w*:", line)]
    told = ([line for line in errors if "exited with error code 10" not in line] or lines or [""])[
        -1
    ]
    told = re.sub(r"0x[0-9a-f]+|(?<![:/\w])/[\w./-]*/(?=[\w.-]+)|\bpid \d+", "", told)
    return told[:200]


@dataclasses.dataclass
class Pair:
    """One test on both backends.

    Attributes:
        gloo: outcomes of its rounds on gloo, at least one.
        peer: outcomes of its rounds on the backend in gloo's place.
    """

    gloo: list[Outcome]
    peer: list[Outcome]

    def passes(self) -> tuple[str, str]:
        """Returns passed rounds of all, for gloo and for the backend in its place."""
        return tuple(  # type: ignore[return-value]
            f"{sum(o['outcome'] == 'passed' for o in rounds)}/{len(rounds)}"
            for rounds in (self.gloo, self.peer)
        )

    @property
    def differs(self) -> bool:
        """Whether a round passed on gloo and one did not in its place."""
        return any(o["outcome"] == "passed" for o in self.gloo) and any(
            o["outcome"] != "passed" for o in self.peer
        )

    @property
    def worse(self) -> bool:
        """Whether gloo passes most rounds and the backend in its place fails most."""
        return _passes_most(self.gloo) and not _passes_most(self.peer)


def _passes_most(rounds: list[Outcome]) -> bool:
    return 2 * sum(o["outcome"] == "passed" for o in rounds) > len(rounds)


class Comparison:
    """All tests of a run, by suite, as FILE::CLASS.TEST."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.suites: dict[str, dict[str, Pair]] = {}
        self.seconds: dict[str, Counter[str]] = {}
        self.not_imported: dict[str, str] = {}

    def add(
        self, suite: str, file: str, gloo: tuple[FileOutcomes, str], peer: tuple[FileOutcomes, str]
    ) -> dict[str, Pair]:
        """Takes one file's outcomes and returns its tests that differ."""
        pairs = self.suites.setdefault(suite, {})
        for told in gloo[1], peer[1]:
            if told:
                self.not_imported[file] = told
        added = {}
        for test in [*gloo[0], *(t for t in peer[0] if t not in gloo[0])]:
            rounds = [
                [found.get(test, {"outcome": _NOT_RUN, "detail": told, "seconds": 0.0})]
                for found, told in (gloo, peer)
            ]
            added[f"{file}::{test}"] = Pair(*rounds)
        pairs.update(added)
        times = self.seconds.setdefault(suite, Counter())
        times["gloo"] += round(sum(o["seconds"] for o in gloo[0].values()))
        times[self.backend] += round(sum(o["seconds"] for o in peer[0].values()))
        return {name: pair for name, pair in added.items() if pair.differs}

    def pairs(self) -> dict[str, Pair]:
        """Returns all tests."""
        return {name: pair for pairs in self.suites.values() for name, pair in pairs.items()}

    def counts(self, suite: str, on_gloo: bool) -> Counter[str]:
        """Returns how many tests of a suite passed, failed, were skipped or not run."""
        pairs = self.suites[suite].values()
        rounds = [pair.gloo if on_gloo else pair.peer for pair in pairs]
        return Counter("passed" if _passes_most(r) else r[0]["outcome"] for r in rounds)

    def record(self, not_applicable: dict[str, str]) -> dict[str, Any]:
        """Returns what is written down: counts, every difference, and reasons folded."""
        worse, unsteady, beyond, not_compared = {}, {}, [], {}
        failed: dict[str, list[str]] = {}
        skipped: Counter[str] = Counter()
        for name, pair in self.pairs().items():
            on_gloo, on_peer = pair.gloo[0], pair.peer[0]
            if pair.differs:
                wrong = next(o for o in pair.peer if o["outcome"] != "passed")
                row = dict(zip(("gloo", self.backend), pair.passes(), strict=True))
                row["error"] = first_error(wrong["detail"])
                if name in not_applicable:
                    row["not_applicable"] = not_applicable[name]
                (worse if pair.worse else unsteady)[name] = row
            elif on_gloo["outcome"] == _NOT_RUN and on_peer["outcome"] == "failed":
                not_compared[name] = first_error(on_peer["detail"])
            elif on_gloo["outcome"] == "skipped":
                skipped[first_error(on_gloo["detail"])] += 1
            elif on_peer["outcome"] == "passed" and on_gloo["outcome"] == "failed":
                beyond.append(name)
            elif on_gloo["outcome"] == "failed":
                failed.setdefault(first_error(on_gloo["detail"]), []).append(name)
        return {
            "suites": {
                suite: {
                    "seconds": dict(self.seconds[suite]),
                    "gloo": dict(self.counts(suite, on_gloo=True)),
                    self.backend: dict(self.counts(suite, on_gloo=False)),
                }
                for suite in self.suites
            },
            f"{self.backend}_fails": worse,
            "not_compared": not_compared,
            "unsteady": unsteady,
            "gloo_fails_only": sorted(beyond),
            "both_fail": {error: len(names) for error, names in sorted(failed.items())},
            "both_skip": dict(sorted(skipped.items())),
            "files_ended_early": {
                file: first_error(told) for file, told in self.not_imported.items()
            },
        }
