"""The quick rows of the fault matrix, and that every row has a play or a test."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend import beyond_gloo
from fault_job import JobFailed, Jobs, Launcher
from fault_matrix import numbers, table
from fault_rank import Rank
from matrix_row import ROWS, NotPlayed, Outcome, Row, Stage, Verdict, failure, worst

HERE = Path(__file__).parent
TESTS = HERE.parents[1]

# Those that `make test` leaves to `make test-all`. Rows 10, 11 and 22 take more than two seconds: the link that is
# cut times out, the core dump is of 512 MB, and the clock that steps takes a library and ranks of its own. Rows 48 to
# 52 are about what tensors hold, which tests/collectives has.
FULL = {10, 11, 22, *range(48, 53)}

# Those that load the recording device, which is built before the first test.
ON_DEVICE = {55, *range(65, 69)}


def rows(on_device: bool):
    return [
        pytest.param(
            row, id=str(row.number), marks=[pytest.mark.full] if row.number in FULL else []
        )
        for row in ROWS
        if row.quick and (row.number in ON_DEVICE) == on_device
    ]


@beyond_gloo("`make faults` plays them with gloo")
@pytest.mark.parametrize("row", rows(on_device=False))
def test_row(jobs, row):
    outcome, _ = row.run(Stage(jobs, "fastcoll", rounds=3))
    jobs.settle(5.0)
    as_wanted(outcome)


@beyond_gloo("`make faults` plays them with gloo")
@pytest.mark.parametrize("row", rows(on_device=True))
def test_row_on_a_device(device_libraries, jobs, row):
    test_row(jobs, row)


def as_wanted(outcome):
    if outcome.verdict == Verdict.NOT_PLAYED:
        pytest.skip(outcome.detail)
    assert outcome.verdict == Verdict.AS_WANTED, f"{outcome.verdict}: {outcome.detail}"


@pytest.fixture(scope="module")
def launcher_of_two_hosts() -> Iterator[Launcher]:
    launcher = Launcher({"FASTCOLL_TEST_HOSTS": "2"})
    yield launcher
    launcher.close()


# Rows 39 and 40 are about ranks that share memory. Row 59 counts descriptors, and Gloo keeps the connection of a
# stranger that says nothing it knows.
OVER_HOSTS = [row for row in ROWS if row.quick and row.number not in (39, 40, 59)]


@pytest.mark.full
@beyond_gloo("fastcoll's own hosts")
@pytest.mark.parametrize("row", OVER_HOSTS, ids=lambda row: str(row.number))
def test_row_over_two_hosts(device_libraries, launcher_of_two_hosts, job_store, tmp_path, row):
    jobs = Jobs(launcher_of_two_hosts, job_store, tmp_path)
    try:
        outcome, _ = row.run(Stage(jobs, "fastcoll", rounds=3, hosts=2))
        jobs.settle(5.0)
    finally:
        left = jobs.close()
    as_wanted(outcome)
    assert not left, f"left behind: {left}"


def test_every_row_is_there_once():
    assert sorted(row.number for row in ROWS) == list(range(1, 69))


def test_rows_that_are_not_quick_have_tests():
    """Else `make test` would not have the fault at all. The sanitizers have `make sanitize`."""
    missing = [row.number for row in ROWS if not row.quick and not row.tests]
    assert missing == [61, 63]


def test_tests_that_rows_name_exist():
    files = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    for row in ROWS:
        for name in row.tests:
            file, _, function = name.partition("::")
            assert f"\ndef {function}(" in files[file], f"row {row.number}: {name}"


def test_plays_are_of_modules_that_ranks_can_import():
    for row in ROWS:
        module = importlib.import_module(row.play.__module__)
        assert getattr(module, row.play.__name__) is row.play


# --- how outcomes are judged ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "text", "verdict"),
    [
        ("silent", "rank 1 says nothing", Verdict.HANG),
        ("ended", "rank 1 ended with -6", Verdict.CRASH),
        ("raised", "rank 1 raised\nAssertionError: a wrong result", Verdict.WRONG_RESULT),
        ("raised", "rank 1 raised\nRuntimeError: no", Verdict.FAILS),
    ],
)
def test_a_rank_that_does_not_answer(how, text, verdict):
    assert failure(JobFailed(text, how)).verdict == verdict


@pytest.mark.parametrize("how", ["raised", "silent"])
def test_a_rank_that_cannot_inject_the_fault(how):
    """A peer that waits for it has this in the log that comes with its own failure."""
    text = "rank 0 raised\n  File\nmatrix_row.NotPlayed: unshare: Operation not permitted\n"
    with pytest.raises(NotPlayed, match=r"^unshare: Operation not permitted$"):
        failure(JobFailed(text, how))


def cannot_inject(rank: Rank):
    if rank.rank == 1:
        raise NotPlayed("the machine forbids it")
    rank.hear()


@beyond_gloo("no backend takes part")
def test_a_row_whose_fault_a_rank_cannot_inject_is_not_played(jobs):
    def play(stage):
        return stage.checks(stage.jobs(2, cannot_inject), timeout=1.0)

    outcome, _ = Row(0, "", "", play).run(Stage(jobs, "fastcoll"))
    assert outcome == Outcome(Verdict.NOT_PLAYED, detail="the machine forbids it")


def test_the_worst_rank_is_the_row():
    outcomes = [Outcome(Verdict.AS_WANTED, 0.5), Outcome(Verdict.CRASH), Outcome(Verdict.HANG, 9.0)]
    assert worst(outcomes).verdict == Verdict.CRASH
    assert worst([Outcome(Verdict.AS_WANTED, t) for t in (0.1, 0.7, 0.2)]).seconds == 0.7


def test_numbers_of_rows():
    assert numbers("1-3,23") == [1, 2, 3, 23]
    for text in ("0", "69", "a", "3-"):
        if text == "3-":
            assert numbers(text) == [3]
            continue
        with pytest.raises(Exception, match="rows"):
            numbers(text)


def test_table_has_all_backends():
    found = {"verdict": "as wanted", "seconds": 0.1}
    row = {"row": 1, "fault": "a", "wanted": "b", "backends": {"fastcoll": found}}
    assert len(table([row], ["fastcoll", "gloo"]).columns) == 5
