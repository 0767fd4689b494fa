"""torch's test harness, changed when this module is imported: by a launcher, and by ranks that a test spawns."""

import os

from torch_suites import harness

__all__: list[str] = []

harness.change_harness()
harness.serve(os.environ["TORCH_SUITES_BACKEND"])
