"""The links of a built site that leave it."""

from pathlib import Path

import built_site
import pytest


@pytest.mark.parametrize(
    ("link", "address", "expected"),
    [
        ("other.html#part", "", '<a href="other.html#part">text</a>'),
        ("https://a.org/x", "", '<a href="https://a.org/x">text</a>'),
        ("#part", "", '<a href="#part">text</a>'),
        ("../../setup.py", "", "text"),
        ("../../setup.py#L1", "https://a.org/f", '<a href="https://a.org/f/blob/main/setup.py#L1">text</a>'),
        ("../../tests", "https://a.org/f", '<a href="https://a.org/f/tree/main/tests">text</a>'),
        ("../../README.html", "https://a.org/f", '<a href="https://a.org/f/blob/main/README.md">text</a>'),
    ],
)  # fmt: skip
def test_a_link(tmp_path: Path, link: str, address: str, expected: str) -> None:
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "other.html").touch()
    page = tmp_path / "guides" / "page.html"
    page.write_text(f'<p><a href="{link}">text</a></p>')
    assert built_site.repaired(page, tmp_path, address) == (f"<p>{expected}</p>", [])


def test_what_leads_nowhere_is_named(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<a href="../none.py">text</a><img src="none.svg">')
    text, lost = built_site.repaired(page, tmp_path, "")
    assert (text, sorted(lost)) == (page.read_text(), ["../none.py", "none.svg"])
