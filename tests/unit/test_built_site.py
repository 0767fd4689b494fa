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
        ("../../setup.py#L-1", "", '<a href="../sources/setup.py.html#L-1">text</a>'),
        ("../../tests", "", '<a href="../sources/tests.html">text</a>'),
        ("../../setup.py#L1", "https://a.org/f", '<a href="https://a.org/f/blob/main/setup.py#L1">text</a>'),
        ("../../tests", "https://a.org/f", '<a href="https://a.org/f/tree/main/tests">text</a>'),
        ("../../README.html", "https://a.org/f", '<a href="https://a.org/f/blob/main/README.md">text</a>'),
    ],
)  # fmt: skip
def test_a_link(tmp_path, link, address, expected):
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "other.html").touch()
    page = tmp_path / "guides" / "page.html"
    page.write_text(f'<p><a href="{link}">text</a></p>')
    text, lost, needed = built_site.repaired(page, tmp_path, address)
    assert (text, lost) == (f"<p>{expected}</p>", [])
    assert bool(needed) == ("sources/" in expected)


def test_what_leads_nowhere_is_named(tmp_path):
    page = tmp_path / "index.html"
    page.write_text('<a href="../none.py">text</a><img src="none.svg">')
    text, lost, _ = built_site.repaired(page, tmp_path, "")
    assert (text, sorted(lost)) == (page.read_text(), ["../none.py", "none.svg"])


def test_a_picture_has_a_form_for_each_colour_scheme(tmp_path):
    for form in ("light", "dark"):
        (tmp_path / f"a_{form}.svg").touch()
    page = tmp_path / "index.html"
    page.write_text(
        '<picture><source media="(prefers-color-scheme: dark)" srcset="a_dark.svg"/>\n'
        '<img src="a_light.svg" width="640" alt="bars">\n</picture>'
    )
    text, lost, _ = built_site.repaired(page, tmp_path, "")
    assert text == (
        '<img src="a_light.svg#only-light" width="640" alt="bars">'
        '<img src="a_dark.svg#only-dark" width="640" alt="bars">'
    )
    assert lost == []


def test_copies_of_a_file_and_of_a_folder(tmp_path):
    built_site.copy({Path("setup.py"), Path("examples")}, tmp_path)
    page = (tmp_path / "sources" / "setup.py.html").read_text()
    first = (built_site.ROOT / "setup.py").read_text().splitlines()[0]
    assert first.strip('"')[:20] in page and 'id="L-1"' in page and 'href="../index.html"' in page
    listed = (tmp_path / "sources" / "examples.html").read_text()
    assert '<a href="examples/hello.py.html">hello.py</a>' in listed
    assert (tmp_path / "sources" / "examples" / "hello.py.html").exists()
