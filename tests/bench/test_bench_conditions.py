"""The commit in a record is fastcoll's, or none."""

import re
import subprocess
from pathlib import Path

import pytest

from fastcoll.bench import conditions


def repository(root: Path, *files: str) -> None:
    """Make a repository with one commit, of these files."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", *files], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", root, *words], check=True)


def revision(root: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(conditions, "__file__", str(root / "bench" / "conditions.py"))
    return conditions._revision()


CHECKOUT = ("setup.py", "bench/conditions.py")


def test_a_checkout_has_a_commit(tmp_path, monkeypatch):
    repository(tmp_path, *CHECKOUT)
    commit = revision(tmp_path, monkeypatch)
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "setup.py").write_text("x = 1")
    assert revision(tmp_path, monkeypatch) == commit + "+"


def test_the_repository_of_a_user_is_not_fastcolls(tmp_path, monkeypatch):
    inner = Path(".venv/lib/python3/site-packages/fastcoll")
    installed = tmp_path / inner
    (installed / "bench").mkdir(parents=True)
    repository(tmp_path, "setup.py", "train.py")  # without what is installed below it
    assert revision(installed, monkeypatch) is None
    assert revision(tmp_path, monkeypatch) is None
    copied = tmp_path / "copied"
    repository(copied, "setup.py", *(f"{inner}/{file}" for file in CHECKOUT))
    assert revision(copied / inner, monkeypatch) is None
    assert revision(tmp_path / "absent", monkeypatch) is None
