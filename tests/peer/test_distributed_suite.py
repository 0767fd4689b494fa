"""No test of PyTorch's own backend suite that gloo passes fails on fastcoll.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest`, shipped in torch,
on 3 ranks and CPU. `gloo_outcomes.json` says what gloo does with each of its tests; it is written by
`python tests/peer/record_gloo.py`. Every test has an id here; what gloo skips is skipped with gloo's
reason. FASTCOLL_TEST_BACKEND names another backend to try; FASTCOLL_* and TORCH_* reach the ranks.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch_suite import TorchSuite

BACKEND = os.environ.get("FASTCOLL_TEST_BACKEND", "fastcoll")
GLOO = json.loads(Path(__file__).with_name("gloo_outcomes.json").read_text())
SAME_TORCH = importlib.metadata.version("torch").split("+")[0] == GLOO["torch"]

# Tests that gloo passes and fastcoll cannot, each with the reason. Empty: keep it so.
NOT_APPLICABLE: dict[str, str] = {}

# Tests that gloo fails and fastcoll must pass: all_to_all of lists whose tensors differ in size.
BEYOND_GLOO = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
)

# What is changed in the suite to let it run on a name it does not know (see suite_cases.py):
# - its guards decide as for gloo; its tables of backends with profiling gain the name;
# - dist.monitored_barrier, which torch refuses to any name but "gloo", goes to the group's own;
# - test_ddp_logging_data_cpu expects backend_name "custom", as DDP's C++ logger calls every third-party backend;
# - guards that speak of PyTorch's CI or of old limits of gloo are lifted: "small world size" and "Only MPI supports";
# - 7 tests that insist on 4 ranks get 4.
FEWEST_PASSES = 120


def _folded(why: str) -> str:
    if re.search("cuda|nccl", why, re.IGNORECASE):
        return "for CUDA or NCCL only"
    if re.search("issues/|failing|flaki", why):
        return "disabled by PyTorch itself"
    return why


def _cases() -> Iterator[Any]:
    reasons = dict(NOT_APPLICABLE)
    for why, tests in GLOO["skipped"].items():
        reasons |= dict.fromkeys(tests, f"gloo skips it too: {_folded(why)}")
    for test in GLOO["failed"]:
        if BACKEND == "gloo" or test not in BEYOND_GLOO:
            reasons[test] = "gloo fails it: see gloo_outcomes.json"
    for test in sorted({*GLOO["passed"], *GLOO["failed"], *reasons}):
        marks = [pytest.mark.skip(reason=reasons[test])] if test in reasons else []
        yield pytest.param(test, id=test.removeprefix("test_"), marks=marks)


@pytest.fixture(scope="module")
def suite() -> Iterator[TorchSuite]:
    suite = TorchSuite(BACKEND)
    yield suite
    suite.close()


@pytest.mark.parametrize("test", list(_cases()))
def test_backend(suite: TorchSuite, test: str) -> None:
    if test not in suite.tests:
        pytest.skip(f"torch {suite.torch_version} has no such test")
    reply = suite.run(test)
    assert reply["outcome"] == "passed", (
        f"{reply['outcome']} on {BACKEND}, where gloo passes:\n{reply['detail']}"
    )


@pytest.mark.skipif(
    not SAME_TORCH,
    reason=f"gloo_outcomes.json is of torch {GLOO['torch']}: run record_gloo.py",
)
def test_every_test_of_the_suite_is_accounted_for(suite: TorchSuite) -> None:
    skipped = [test for tests in GLOO["skipped"].values() for test in tests]
    assert sorted([*GLOO["passed"], *GLOO["failed"], *skipped]) == suite.tests
    assert len(GLOO["passed"]) >= FEWEST_PASSES
    assert set(BEYOND_GLOO) <= set(GLOO["failed"])
    assert set(NOT_APPLICABLE) <= set(GLOO["passed"])
