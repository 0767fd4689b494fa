"""How soon a fault is noticed: the bound, and a note of it for the table that ``make faults`` prints."""

from dataclasses import dataclass

from suite_rules import bound, slack

__all__ = ["Note", "TooSlow", "in_time", "notes"]


@dataclass(frozen=True)
class Note:
    """How many seconds something took in the running test, and the error that came."""

    seconds: float
    text: str


notes: list[Note] = []
"""Of the running test; cleared before the next."""


class TooSlow(AssertionError):
    """What was wanted came, but too late."""


def in_time(seconds: float, within: float, text: str = "") -> None:
    """Assert that something took ``within`` seconds at most, on an idle machine, and note it.

    In the suite two seconds are always allowed, for there a rank may not run for a second.
    """
    notes.append(Note(seconds, text))
    limit = within if slack() <= 1.0 else max(2.0, bound(within))
    if seconds > limit:
        raise TooSlow(f"took {seconds:.3f} s, expected at most {limit:.3f} s: {text}")
