"""No test of PyTorch's own backend suite that gloo passes fails on fastcoll.

The suite is `torch.testing._internal.distributed.distributed_test.DistributedTest`, shipped in torch,
on 3 ranks and CPU. Every test has an id here. What the suite's own guards skip for gloo is skipped;
what fails is run on gloo, and is a failure if gloo passes it. FASTCOLL_TEST_BACKEND names another
backend to try; FASTCOLL_* and TORCH_* reach the ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from suite_cases import BACKEND
from torch_suite import TorchSuite

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

# Tests that gloo passes and fastcoll cannot, each with the reason. Empty: keep it so.
NOT_APPLICABLE: dict[str, str] = {}

# Tests that gloo fails and fastcoll must pass: all_to_all of lists whose tensors differ in size.
BEYOND_GLOO = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
)

# Tests that wait for five seconds.
SLOW = ("test_barrier_timeout_group",)

# What is changed in the suite to let it run on a name it does not know (see suite_cases.py):
# - its guards decide as for gloo; its tables of backends with profiling gain the name;
# - dist.monitored_barrier, which torch refuses to any name but "gloo", goes to the group's own;
# - test_ddp_logging_data_cpu expects backend_name "custom", as DDP's C++ logger calls every third-party backend;
# - guards that speak of PyTorch's CI or of old limits of gloo are lifted: "small world size" and "Only MPI supports";
# - 7 tests that insist on 4 ranks get 4.
FEWEST_PASSES = 120

Suites = Callable[[str], TorchSuite]


def _folded(why: str) -> str:
    if re.search("cuda|nccl", why, re.IGNORECASE):
        return "for CUDA or NCCL only"
    if re.search("issues/|failing|flaki", why):
        return "disabled by PyTorch itself"
    return why


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suites]:
    """The suite of a backend; that of gloo is loaded when it is asked for."""
    made: dict[str, TorchSuite] = {}

    def suite(backend: str) -> TorchSuite:
        if backend not in made:
            made[backend] = TorchSuite(backend, tmp_path_factory.mktemp(backend))
        return made[backend]

    suite(BACKEND)
    yield suite
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
def test_backend(suites: Suites, outcomes: dict[str, str], tmp_path: Path, test: str) -> None:
    outcomes[test] = "skipped"
    if why := NOT_APPLICABLE.get(test):
        pytest.skip(f"beyond fastcoll: {why}")
    if why := suites(BACKEND).skips[test]:
        pytest.skip(f"gloo skips it too: {_folded(why)}")
    outcomes[test], detail = suites(BACKEND).run(test, tmp_path)
    if outcomes[test] == "passed":
        return
    if test not in BEYOND_GLOO or BACKEND == "gloo":
        folder = tmp_path / "gloo"
        folder.mkdir()
        on_gloo, told = suites("gloo").run(test, folder)
        if on_gloo == "skipped":
            pytest.skip(f"gloo skips it too: {_folded(told)}")
        if on_gloo == "failed":
            pytest.skip(f"gloo fails it: {re.findall('.*Error.*', told)[-1:]}")
    pytest.fail(f"{outcomes[test]} on {BACKEND}, where gloo passes:\n{detail}")


def test_every_test_of_the_suite_is_accounted_for(suites: Suites) -> None:
    skips = suites(BACKEND).skips
    assert sorted(skips) == TESTS
    run = {test for test, why in skips.items() if why is None}
    assert len(run) >= FEWEST_PASSES
    assert {*BEYOND_GLOO, *NOT_APPLICABLE, *SLOW} <= run
