"""`fastcoll compare`: a job is run on both backends in turns, and the verdict holds."""

import sys
from pathlib import Path

import pytest

from fastcoll.compare import main
from fastcoll.examples import __file__ as EXAMPLES

JOB = """
import os, sys
ours = "FASTCOLL_REPLACE" in os.environ
if ours and {served} or {theirs}:
    print("[fastcoll] group '0' rank 0/2: shm", file=sys.stderr)
for step in range(4):
    print(f"step {{step}} loss {{{loss}}}")
{end}
"""


def job(
    folder: Path,
    served: bool = True,
    theirs: bool = False,
    loss: str = "0.5 / (1 + step)",
    end: str = "",
) -> list[str]:
    """The command of a job that prints losses, and what fastcoll prints when it serves a group."""
    script = folder / "job.py"
    script.write_text(JOB.format(served=served, theirs=theirs, loss=loss, end=end))
    return ["--", sys.executable, str(script)]


def compared(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capfd.readouterr()
    return status, out, err


def test_equal_losses(tmp_path, capfd):
    status, out, err = compared(capfd, *job(tmp_path))
    assert status == 0
    assert "All 4 losses are equal, as printed." in out
    assert [line.split(" on ")[1] for line in err.splitlines()] == [
        *("gloo ...", "fastcoll ...", "fastcoll ...", "gloo ...")
    ]
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    assert rows["losses printed"] == ["4", "4"] and rows["errors printed"] == ["0", "0"]
    assert len([float(cell) for cell in rows["whole run, s"]]) == 2
    folder = Path(out.splitlines()[-1].split(": ")[1])
    assert sorted(path.name for path in folder.iterdir()) == [
        *("fastcoll_1.log", "fastcoll_2.log", "gloo_1.log", "gloo_2.log")
    ]


@pytest.mark.parametrize(
    ("given", "status", "expected"),
    [
        ({"loss": "0.5 + ours * 1e-5"}, 0, "4 of 4 losses differ, by 2e-05 of their size at most."),
        ({"loss": "0.5 + ours"}, 1, "4 of 4 losses differ, by 0.67 of their size at most."),
        ({"loss": "float('nan')"}, 0, "All 4 losses are equal, as printed."),
        ({"loss": "'none'"}, 0, "No losses were printed: name their pattern with --pattern."),
        ({"end": "print('loss 1') if ours else None"}, 1, "4 and 5 losses were printed."),
        ({"end": "sys.exit(3 if ours else 0)"}, 1, "The job failed on fastcoll, and on gloo it did not: "),
        ({"end": "raise ValueError('both')"}, 1, "The job failed on fastcoll, as it did without it: "),
        ({"end": "raise ValueError('both')"}, 1, "fastcoll: ValueError: both"),
        ({"theirs": True}, 2, "The job names fastcoll itself. Name gloo in it, and compare again."),
        ({"served": False}, 2, "fastcoll served no group: the job made none of gloo or of no name."),
    ],
)  # fmt: skip
def test_verdicts(given, status, expected, tmp_path, capfd):
    found, out, _ = compared(capfd, "--rounds", "1", *job(tmp_path, **given))
    assert found == status and expected in out, out


def test_a_job_that_names_fastcoll_runs_once(tmp_path, capfd):
    status, _, err = compared(capfd, *job(tmp_path, theirs=True))
    assert (status, err) == (2, "run 1 of 2 on gloo ...\n")


def test_a_job_that_can_not_be_started(capfd):
    status, _, err = compared(capfd, "--", "/nonexistent/torchrun", "x.py")
    assert status == 2
    assert err.endswith("fastcoll compare: /nonexistent/torchrun: No such file or directory\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--pattern", "loss", "--", "x"], "expected a --pattern with one group"),
        (["--pattern", "(", "--", "x"], "--pattern: missing )"),
        (["--rounds", "0", "--", "x"], "a round at least"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_arguments(arguments, error, capfd):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert error in capfd.readouterr().err


@pytest.mark.full
def test_a_training_by_torchrun(capfd):
    """The script names gloo; its losses are the same bits on fastcoll."""
    script = Path(EXAMPLES).with_name("ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(script), "--backend", "gloo"]
    status, out, err = compared(capfd, "--rounds", "1", "--", *command)
    assert status == 0, out + err
    assert "losses are equal, as printed." in out
