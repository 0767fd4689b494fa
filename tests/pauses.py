"""How long the machine has stood still: a host stops a virtual machine for seconds to move or copy it.

No program can then keep a time limit. So a thread of the test process sleeps for short times, and counts the seconds
overslept; ``suite_rules.bound`` adds them. Pauses of ranks or of the product's threads are not counted, because they
run in other processes.
"""

import threading
import time

STEP = 0.05
"""Seconds of each sleep."""

LEAST = 0.5
"""Least seconds overslept that count; less is the scheduler of a busy machine, which the factor of bounds covers."""


class Pauses(threading.Thread):
    """Counts pauses from its start on."""

    def __init__(self) -> None:
        super().__init__(name="pauses", daemon=True)
        self._seconds = 0.0
        self._before = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of all pauses of at least ``LEAST``, including one that is ending now."""
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
