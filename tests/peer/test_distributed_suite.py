"""No test of PyTorch's own backend suite that gloo passes fails on fastcoll.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest`, shipped in torch,
on 3 ranks and CPU, with fastcoll in gloo's place. Every test has an id here. What the suite's own
guards skip for gloo is skipped; what fails is run on gloo, and is a failure if gloo passes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from backend import BACKEND
from torch_suites.runs import SuiteFiles

SOURCE = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"

# The methods of a class within a class, but for those in strings. To import it takes each process seconds.
TESTS = sorted(
    set(
        re.findall(
            r"^        def (test_\w+)\(",
            re.sub(r'""".*?"""', "", SOURCE.read_text(), flags=re.DOTALL),
            re.MULTILINE,
        )
    )
)

# Tests that gloo fails and fastcoll must pass: all_to_all of lists whose tensors differ in size.
BEYOND_GLOO = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
)

# Tests that wait for five seconds.
SLOW = ("test_barrier_timeout_group",)

# What suite_loaded.py changes: DDP's logger, which calls every third-party backend "custom", is to call it that;
# guards that speak of PyTorch's CI or of old limits of gloo are lifted; 7 tests that insist on 4 ranks get 4.
FEWEST_PASSES = 120

SECONDS = 50.0
"""Limit for one test, below the suite's own 60 s for a collective; gloo's longest test takes 5."""

Run = Callable[[str, str], tuple[str, str]]


def _folded(why: str) -> str:
    if re.search("cuda|nccl", why, re.IGNORECASE):
        return "for CUDA or NCCL only"
    if re.search("issues/|failing|flaki", why):
        return "disabled by PyTorch itself"
    return why


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a test on a backend; gloo's suite is loaded when it is asked for."""
    file = Path(__file__).with_name("suite_loaded.py")
    made: dict[str, SuiteFiles] = {}

    def load(backend: str) -> SuiteFiles:
        if backend not in made:
            made[backend] = SuiteFiles(file.parent, backend, SECONDS, preload=[file.stem])
        return made[backend]

    def run(backend: str, test: str) -> tuple[str, str]:
        name = f"DistributedSuite.{test}"
        found, end = load(backend).run(str(file), SECONDS, [name])
        assert name in found, end
        return found[name]["outcome"], found[name]["detail"]

    load(BACKEND)
    yield run
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    """What became of each test; in a run of all of them, most have passed."""
    found: dict[str, str] = {}
    yield found
    counts = Counter(found.values())
    assert len(found) < len(TESTS) or counts["passed"] >= FEWEST_PASSES, counts


@pytest.mark.parametrize(
    "test",
    [pytest.param(t, marks=pytest.mark.full) if t in SLOW else t for t in TESTS],
    ids=lambda test: test.removeprefix("test_"),
)
def test_backend(run: Run, outcomes: dict[str, str], test: str) -> None:
    outcomes[test], detail = run(BACKEND, test)
    if outcomes[test] == "skipped":
        pytest.skip(f"gloo skips it too: {_folded(detail)}")
    if outcomes[test] == "failed" and (test not in BEYOND_GLOO or BACKEND == "gloo"):
        on_gloo, told = run("gloo", test)
        if on_gloo == "skipped":
            pytest.skip(f"gloo skips it too: {_folded(told)}")
        if on_gloo == "failed":
            pytest.skip(f"gloo fails it: {re.findall('.*Error.*', told)[-1:]}")
    assert outcomes[test] == "passed", f"on {BACKEND}, where gloo passes:\n{detail}"
