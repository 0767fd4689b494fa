"""How long the machine has stood still: a virtual machine is stopped for seconds when its host moves or copies it.

No program can keep a bound on a time then. So a thread of the test process sleeps for short times, and counts what it
overslept; ``suite_rules.bound`` adds that. A pause of one rank, or of the product's threads, is not seen here, as they
run in processes of their own.
"""

import threading
import time

__all__ = ["Pauses"]

STEP = 0.05
"""Seconds that each sleep is to take."""

LEAST = 0.5
"""Seconds overslept that count: less is the scheduler of a busy machine, for which bounds have a factor."""


class Pauses(threading.Thread):
    """Counts them from its start on."""

    def __init__(self) -> None:
        super().__init__(name="pauses", daemon=True)
        self._seconds = 0.0
        self._before = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of all pauses that lasted at least ``LEAST``, one that ends just now included."""
        late = time.monotonic() - self._before - STEP
        return self._seconds + (late if late >= LEAST else 0.0)

    def run(self) -> None:
        """Sleep and count, as long as the process lives."""
        while True:
            time.sleep(STEP)
            self.slept(time.monotonic())

    def slept(self, now: float) -> None:
        """Count one sleep that ended at ``now``."""
        late = now - self._before - STEP
        if late >= LEAST:
            self._seconds += late
        self._before = now
