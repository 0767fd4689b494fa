"""No test of PyTorch's own backend suite that gloo passes fails on fastcoll.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest`, shipped in torch,
on 3 ranks and CPU, with fastcoll in gloo's place. Every test has an id here. What the suite's own
guards skip for gloo is skipped; what fails is run on gloo, and is a failure if gloo passes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backend import BACKEND
from torch_suites.runs import FileOutcomes, SuiteFiles

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

# What suite_loaded.py changes: DDP's logger, which calls every third-party backend "custom", is to call it that;
# guards that speak of PyTorch's CI or of old limits of gloo are lifted; 7 tests that insist on 4 ranks get 4; no rank
# leaves a new group while the gloo group of torch's debugging wrapper still connects on another.
FEWEST_PASSES = 120

SECONDS = 50.0
"""Limit for one test, below the suite's own 60 s for a collective; gloo's longest test takes 5."""

TOGETHER = 500.0
"""Limit for all selected tests."""

# The first item waits for all tests.
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

Run = Callable[[str, list[str]], FileOutcomes]


def _folded(why: str) -> str:
    if re.search("cuda|nccl", why, re.IGNORECASE):
        return "for CUDA or NCCL only"
    if re.search("issues/|failing|flaki", why):
        return "disabled by PyTorch itself"
    return why


@pytest.fixture(scope="module")
def run():
    """Runs tests on a backend; gloo's suite is loaded when it is first used."""
    file = Path(__file__).with_name("suite_loaded.py")
    made: dict[str, SuiteFiles] = {}

    def run(backend: str, tests: list[str]) -> FileOutcomes:
        if backend not in made:
            made[backend] = SuiteFiles(file.parent, backend, SECONDS, preload=[file.stem])
        names = [f"DistributedSuite.{test}" for test in tests]
        found, end = made[backend].run(str(file), TOGETHER, names)
        assert found.keys() == set(names), end
        return {test: found[name] for test, name in zip(tests, names, strict=True)}

    yield run
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def outcomes(request, run):
    """What became of each selected test, each in a process of its own."""
    items = [item for item in request.session.items if item.path == request.path]
    found = run(BACKEND, [item.callspec.params["test"] for item in items])
    counts = Counter(each["outcome"] for each in found.values())
    assert len(found) < len(TESTS) or counts["passed"] >= FEWEST_PASSES, counts
    return found


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.removeprefix("test_"))
def test_backend(run, outcomes, test):
    outcome, detail = outcomes[test]["outcome"], outcomes[test]["detail"]
    if outcome == "skipped":
        pytest.skip(f"gloo skips it too: {_folded(detail)}")
    if outcome == "failed" and (test not in BEYOND_GLOO or BACKEND == "gloo"):
        on_gloo = run("gloo", [test])[test]
        if on_gloo["outcome"] == "skipped":
            pytest.skip(f"gloo skips it too: {_folded(on_gloo['detail'])}")
        if on_gloo["outcome"] == "failed":
            pytest.skip(f"gloo fails it: {re.findall('.*Error.*', on_gloo['detail'])[-1:]}")
    assert outcome == "passed", f"on {BACKEND}, where gloo passes:\n{detail}"
