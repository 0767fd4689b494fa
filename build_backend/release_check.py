"""Checks that a tag can be released: one version everywhere. ``--notes`` prints the changelog of that version.

python build_backend/release_check.py v0.1.0
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

__all__ = ["main", "notes", "problems"]

ROOT = Path(__file__).resolve().parents[1]


def notes(version: str, changelog: str) -> str:
    """Returns the changelog of a version, or ""."""
    found = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)",
        changelog,
        re.DOTALL | re.MULTILINE,
    )
    return found[1].strip() if found else ""


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Returns a sentence for each place that differs from the tag."""
    version = tag.removeprefix("v")
    package = re.search(
        r'^__version__ = "(.+)"$', (root / "fastcoll" / "_version.py").read_text(), re.MULTILINE
    )
    citation = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    found = []
    if not tag.startswith("v"):
        found.append(f"the tag is {tag}: expected v and a version, such as v0.1.0")
    for name, match in (("fastcoll/_version.py", package), ("CITATION.cff", citation)):
        if match is None or match[1].strip('"') != version:
            says = match[1] if match else "nothing"
            found.append(f"{name} says {says}: expected {version}, as the tag does")
    if not notes(version, (root / "CHANGELOG.md").read_text()):
        found.append(
            f"CHANGELOG.md has no section [{version}]: give [Unreleased] that name and the date"
        )
    return found


def main() -> int:
    """Returns 0 if the tag can be released."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--notes", action="store_true", help="print the changelog of the version")
    options = parser.parse_args()
    if options.notes:
        print(notes(options.tag.removeprefix("v"), (ROOT / "CHANGELOG.md").read_text()))
        return 0
    found = problems(options.tag)
    for problem in found:
        print(f"release_check: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
