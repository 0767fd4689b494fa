"""What docs/troubleshooting.md quotes of errors is what the sources say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def sources():
    """All texts, those of several literals in one piece; f-strings and concat()s lose only their values."""
    files = [*ROOT.glob("csrc/**/*.[ch]pp"), *ROOT.glob("fastcoll/**/*.py")]
    joined = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", joined)


def test_the_page_quotes_errors():
    assert len(QUOTED) >= 12


@pytest.mark.parametrize("text", [*QUOTED, "cannot reserve", "Raise the limit on open files"])
def test_an_error_says_so(sources, text):
    assert text in PAGE and text in sources


def test_links_within_the_page_lead_somewhere():
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
