"""What a release is checked for, and the notes that come with it."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_BACKEND = str(ROOT / "build_backend")


@pytest.fixture(autouse=True)
def build_backend(monkeypatch):
    monkeypatch.syspath_prepend(BUILD_BACKEND)
    for name in ("supported", "release_check"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_tag_of_this_version_can_be_released_once_the_changelog_names_it(tmp_path):
    import release_check

    version = re.search(r'= "(.+)"', (ROOT / "fastcoll" / "_version.py").read_text())[1]
    (tmp_path / "fastcoll").mkdir()
    for name in ("fastcoll/_version.py", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    text = (ROOT / "CHANGELOG.md").read_text()
    released = f"## [{version}] - 2026-12-01"
    (tmp_path / "CHANGELOG.md").write_text(text.replace("## [Unreleased]", released, 1))
    assert release_check.problems(f"v{version}", tmp_path) == []
    assert len(release_check.problems("v9.9.9", tmp_path)) == 3
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n### Added\n- A\n")
    (problem,) = release_check.problems(f"v{version}", tmp_path)
    assert f"CHANGELOG.md has no section [{version}]" in problem


def test_the_notes_of_a_release_are_its_section():
    import release_check

    text = "# Changelog\n\n## [Unreleased]\n\n## [1.1.0] - 2026\n\n### Added\n- B\n\n## [1.0.0] - 2025\n- A\n"
    assert release_check.notes("1.1.0", text) == "### Added\n- B"
    assert release_check.notes("1.0.0", text) == "- A"
    assert release_check.notes("1.0", text) == ""
