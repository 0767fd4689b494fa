"""What a rank must be told of a fault, and how soon, with a note of it for the table that ``.ci/run faults`` prints."""

from fault_rank import Fault
from suite_rules import bound, slack

notes: list[tuple[float, str]] = []
"""How many seconds something took in the running test, and the error that came; cleared before the next."""


class TooSlow(AssertionError):
    """What was wanted came, but too late."""


def in_time(seconds: float, within: float, text: str = "") -> None:
    """Assert that something took ``within`` seconds at most, on an idle machine, and note it.

    In the suite two seconds are always allowed, for there a rank may not run for a second.
    """
    notes.append((seconds, text))
    limit = within if slack() <= 1.0 else max(2.0, bound(within))
    if seconds > limit:
        raise TooSlow(f"took {seconds:.3f} s, expected at most {limit:.3f} s: {text}")


def assert_raised(
    fault: Fault | None,
    *said: str,
    since: float | None = None,
    within: float | None = None,
    kind: str = "DistBackendError",
) -> None:
    """Assert that a call raised, and what: all parts ``said``.

    Since the call, or ``since``, it may have taken so many seconds as ``in_time`` allows.
    """
    assert fault is not None, "no error: success was reported"
    assert fault.kind == kind, f"{fault.kind}: {fault.text}"
    for part in said:
        assert part in fault.text, f"{part!r} is not in: {fault.text}"
    if within is not None:
        in_time(fault.seconds if since is None else fault.at - since, within, fault.text)


def cause(fault: Fault | None) -> str:
    """Return the text behind the call that raised it."""
    assert fault is not None, "no error: success was reported"
    return fault.text.partition("]: ")[2]
