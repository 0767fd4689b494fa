"""What a row of the fault matrix is, and how what came of it is judged.

A row injects one fault for real, on ranks in processes of their own, with whatever backend the stage
has. It says what each rank must then see; the worst of what the ranks saw is the row's outcome.
"""

import dataclasses
import enum
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fault_job import Job, JobFailed, Jobs
from fault_rank import Fault
from suite_rules import bound, slack

__all__ = [
    "ANY_ERROR",
    "ROWS",
    "NotPlayed",
    "Outcome",
    "Row",
    "Stage",
    "Verdict",
    "limit",
    "row",
    "worst",
]

SILENCE = 12.0
"""Seconds after which a rank that says nothing counts as hanging; every bound is far below."""

ANY_ERROR = ("RuntimeError",)
"""Where the row is not about whom the error names: DistBackendError is one."""

ENDED = 1.0
"""Seconds that destroy_process_group may take after a fault."""


def limit(seconds: float) -> float:
    """Return a bound on a time; in the suite two seconds at least, for there a rank may not run for a second."""
    return seconds if slack() <= 1.0 else max(2.0, bound(seconds))


class Verdict(enum.IntEnum):
    """What came of a fault, from good to bad."""

    AS_WANTED = 0
    NOT_PLAYED = 1  # the machine or the backend has no room for the fault
    UNNAMED = 2  # an error in time, which does not say what it should
    TOO_SLOW = 3
    LEFTOVERS = 4
    FAILS = 5  # an error where there should be none, or of the wrong class
    WRONG_RESULT = 6  # or success where there should have been an error
    HANG = 7
    CRASH = 8

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One rank's, or the row's.

    Attributes:
        seconds: from the fault to the error, or whatever the row measures; None if nothing.
        detail: the error's text, or what is wrong.
    """

    verdict: Verdict
    seconds: float | None = None
    detail: str = ""


class NotPlayed(Exception):
    """The machine does not let the fault be injected, or the backend has no such thing."""


def worst(outcomes: Iterable[Outcome], seconds: float | None = None) -> Outcome:
    """Return the worst outcome; of equals the slowest.

    Args:
        seconds: what the row measures, instead of what the worst rank took.
    """
    found = max(outcomes, key=lambda o: (o.verdict, o.seconds or 0.0))
    return found if seconds is None else dataclasses.replace(found, seconds=seconds)


def failure(error: JobFailed) -> Outcome:
    """Judge what a rank did instead of answering.

    Raises:
        NotPlayed: if a rank says, in this error or in its log, that it could not inject the fault;
            then it does not matter what became of those that waited for it.
    """
    text = str(error)
    if reason := re.search(r"^(?:\w+\.)*NotPlayed: (.*)", text, re.MULTILINE):
        raise NotPlayed(reason[1])
    if error.how == "silent":
        return Outcome(Verdict.HANG, detail=text.partition("\n")[0])
    if error.how == "ended":
        return Outcome(Verdict.CRASH, detail=text.partition("\n")[0])
    wrong = re.search(r"AssertionError: (.*)", text)
    if wrong:
        return Outcome(Verdict.WRONG_RESULT, detail=wrong[1])
    raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return Outcome(Verdict.FAILS, detail=raised[-1] if raised else text[-300:])


class Stage:
    """Where a row is played: starts ranks, injects, collects.

    Args:
        jobs: starts the ranks.
        backend: name that the ranks give to ``init_process_group``.
        rounds: of rows that repeat.
        deep: whether rows play their largest sizes (2 GiB on each rank) and all their variants.
        builds: whether rows that compile for minutes are played.
        hosts: on how many pretended hosts the ranks of a row are.
    """

    def __init__(
        self,
        jobs: Jobs,
        backend: str,
        rounds: int = 10,
        deep: bool = False,
        builds: bool = False,
        hosts: int = 1,
    ) -> None:
        self.jobs, self.backend, self.rounds = jobs, backend, rounds
        self.deep, self.builds, self.hosts = deep, builds, hosts

    def require_one_host(self) -> None:
        """Leave the row out where its ranks are to share no memory, which it is about."""
        if self.hosts > 1:
            raise NotPlayed("it is about ranks that share memory")

    @property
    def native(self) -> bool:
        """Whether the backend is fastcoll, which has segments, hellos and records."""
        return self.backend == "fastcoll"

    def started(
        self, size: int, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Job:
        """Start ranks and wait until each has told "ready"."""
        job = self.jobs(size, function, *arguments, **named)
        job.hear_all(timeout=30.0)
        return job

    def errors(
        self,
        job: Job,
        since: float | None,
        within: float,
        *patterns: str,
        but: Iterable[int] = (),
        kinds: Iterable[str] = ("DistBackendError",),
        aftermath: bool = True,
        not_before: float = 0.0,
    ) -> Outcome:
        """Collect one Fault of every rank, told at once, and what it left behind.

        Args:
            since: when the fault was injected; None measures from the rank's own call.
            within: seconds in which each rank must have its error.
            patterns: what the text must say.
            but: ranks that are dead, or away.
            kinds: classes of which the error must be one.
            aftermath: whether the ranks return that of ``matrix_ranks.aftermath`` too.
            not_before: seconds before which an error comes too early, as of a timeout.
        """
        outcomes = []
        away = set(but)
        for rank in job.pids:
            if rank in away:
                continue
            try:
                fault = job.hear(rank, SILENCE)
            except JobFailed as error:
                outcomes.append(failure(error))
                continue
            outcomes.append(self.judged(fault, since, within, patterns, kinds, not_before))
            if aftermath:
                try:
                    outcomes.append(after(job.hear(rank, SILENCE)))
                except JobFailed as error:
                    outcomes.append(failure(error))
        return worst(outcomes)

    def judged(
        self,
        fault: Fault | None,
        since: float | None,
        within: float,
        patterns: Iterable[str] = (),
        kinds: Iterable[str] = ("DistBackendError",),
        not_before: float = 0.0,
    ) -> Outcome:
        """Judge one rank's error."""
        if fault is None:
            return Outcome(Verdict.WRONG_RESULT, detail="no error: success was reported")
        seconds = fault.seconds if since is None else fault.at - since
        if seconds > limit(within):
            return Outcome(Verdict.TOO_SLOW, seconds, fault.text)
        if not_before and seconds < not_before:
            return Outcome(Verdict.FAILS, seconds, "too early: " + fault.text)
        wanted = set(kinds)
        missing = [p for p in patterns if not re.search(p, fault.text, re.IGNORECASE | re.DOTALL)]
        if not wanted & set(fault.bases):
            missing.insert(0, "/".join(sorted(wanted)))
        if missing:
            return Outcome(Verdict.UNNAMED, seconds, f"{fault.kind}: {fault.text}")
        return Outcome(Verdict.AS_WANTED, seconds, fault.text)

    def checks(self, job: Job, timeout: float = 30.0, but: Iterable[int] = ()) -> Outcome:
        """Collect from every rank what ``checked`` scenarios return: {what: whether it holds}.

        If they are there, ``seconds`` and ``detail`` are the row's, ``left`` is what was left
        behind, and ``named`` whether an error said what it should.
        """
        outcomes = []
        for rank in job.pids:
            if rank in set(but):
                continue
            try:
                found = dict(job.hear(rank, timeout))
            except JobFailed as error:
                outcomes.append(failure(error))
                continue
            outcomes.append(held(found))
        return worst(outcomes)

    def ended(self, job: Job, but: Iterable[int] = (), within: float = 10.0) -> Outcome:
        """Wait until all ranks have ended by themselves."""
        outcomes = [Outcome(Verdict.AS_WANTED)]
        for rank in job.pids:
            if rank in set(but):
                continue
            try:
                code = job.end(rank, within)
            except JobFailed as error:
                outcomes.append(failure(error))
                continue
            if code != 0:
                outcomes.append(Outcome(Verdict.CRASH, detail=f"rank {rank} ended with {code}"))
        return worst(outcomes)


def held(found: dict[str, Any]) -> Outcome:
    """Judge a dict of checks; see Stage.checks."""
    seconds, detail = found.pop("seconds", None), found.pop("detail", "")
    within = found.pop("within", None)
    left, named = found.pop("left", []), found.pop("named", True)
    wrong = [what for what, holds in found.items() if not holds]
    if wrong:
        return Outcome(Verdict.WRONG_RESULT, seconds, f"not so: {', '.join(wrong)} {detail}")
    if left:
        return Outcome(Verdict.LEFTOVERS, seconds, ", ".join(left))
    if not named:
        return Outcome(Verdict.UNNAMED, seconds, detail)
    if within is not None and seconds is not None and seconds > limit(within):
        return Outcome(Verdict.TOO_SLOW, seconds, detail)
    return Outcome(Verdict.AS_WANTED, seconds, detail)


def after(found: dict[str, Any]) -> Outcome:
    """Judge what ``Rank.recover`` returned: a sticky error, a quick end, nothing left."""
    if found["again"] is None:
        return Outcome(Verdict.WRONG_RESULT, detail="the failed group worked again")
    if found["left"]:
        return Outcome(Verdict.LEFTOVERS, detail=", ".join(found["left"]))
    if found["destroy"] > limit(ENDED):
        return Outcome(Verdict.TOO_SLOW, found["destroy"], "destroy_process_group")
    return Outcome(Verdict.AS_WANTED)


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        number: that of the reliability matrix.
        fault: what is injected.
        wanted: what must be true then.
        play: injects it and judges.
        tests: tests that go into the row's depth, as ``file::function``.
        quick: whether ``make test`` plays it, beside those tests.
    """

    number: int
    fault: str
    wanted: str
    play: Callable[[Stage], Outcome]
    tests: tuple[str, ...] = ()
    quick: bool = True

    def run(self, stage: Stage) -> tuple[Outcome, float]:
        """Play the row; return its outcome and how long it took."""
        start = time.monotonic()
        try:
            try:
                outcome = self.play(stage)
            except JobFailed as error:
                outcome = failure(error)
        except NotPlayed as reason:
            outcome = Outcome(Verdict.NOT_PLAYED, detail=str(reason))
            stage.jobs.stop()  # ranks may wait for one that could not do its part
        return outcome, time.monotonic() - start


ROWS: list[Row] = []
"""All rows, in the order in which their modules define them."""


def row(
    number: int, fault: str, wanted: str, *tests: str, quick: bool | None = None
) -> Callable[[Callable[[Stage], Outcome]], Callable[[Stage], Outcome]]:
    """Make the decorated function the play of a row.

    Where tests are named, ``make test`` has the fault already, and ``quick`` is False by default.
    """

    def register(play: Callable[[Stage], Outcome]) -> Callable[[Stage], Outcome]:
        ROWS.append(Row(number, fault, wanted, play, tests, not tests if quick is None else quick))
        return play

    return register


def rows(numbers: Iterable[int] | None = None) -> Iterator[Row]:
    """Yield the rows of these numbers, by default all, in order."""
    chosen = None if numbers is None else set(numbers)
    for found in sorted(ROWS, key=lambda r: r.number):
        if chosen is None or found.number in chosen:
            yield found
