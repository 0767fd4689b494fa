"""``python tools/built_site.py build/site``: completes a built site, and checks its links.

A page links to sources and records by relative paths, which are right on GitHub. In the site such a link gets the
repository's address, ``repo_url`` of mkdocs.yml. Without an address it leads to a copy of the file below
``sources/``. A picture with a light and a dark form follows the site's switch, not the system alone. The program
prints one line for each broken link, and ends with status 1 if there is one.
"""

from __future__ import annotations

import html
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COPIES = "sources"
_LINK = re.compile(r'<a ([^>]*?)href="([^"]*)"([^>]*)>(.*?)</a>', re.DOTALL)
_FILE = re.compile(r'(?:src|srcset)="([^"#]*)(?:#[^"]*)?"')
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]*)"\s*/?>\s*'
    r'<img src="([^"]*)"([^>]*)>\s*</picture>'
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{path}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; }}
pre {{ font-size: 13px; line-height: 1.45; overflow-x: auto; }}
.linenos {{ opacity: .5; padding-right: 1em; user-select: none; }}
{colors}
@media (prefers-color-scheme: dark) {{
{dark_colors}
body, .highlight {{ background: #0d1117; color: #e6edf3; }}
}}
</style>
</head>
<body>
<p><a href="{home}">fastcoll</a> / {path}</p>
{body}
</body>
</html>
"""


def _path(link: str) -> str:
    """Returns the path of a relative link, or "" for any other."""
    path = link.partition("#")[0].partition("?")[0]
    return "" if re.match(r"[a-z]+:|/", path) else path


def _copy(path: Path) -> Path:
    """Returns the place of a file's copy in the site."""
    return Path(_COPIES) / path.with_name(f"{path.name}.html")


def repaired(page: Path, site: Path, address: str) -> tuple[str, list[str], set[Path]]:
    """Returns the text of a page of the site with its outer links repaired, its broken links, and what it needs.

    Args:
        page: The page's file.
        site: The folder of the site, which has the layout of docs/.
        address: The repository's address. "" if it has none: then the page needs copies of files.
    """
    text = _PICTURE.sub(r'<img src="\2#only-light"\3><img src="\1#only-dark"\3>', page.read_text())
    here = page.parent.relative_to(site)
    lost = [path for path in map(_path, _FILE.findall(text)) if not (page.parent / path).exists()]
    needed: set[Path] = set()

    def outer(found: re.Match[str]) -> str:
        before, link, after, shown = found.groups()
        path = _path(link)
        if not path or (page.parent / path).exists():
            return found[0]
        target = ROOT / os.path.normpath("docs" / here / path)
        if not target.exists():
            target = target.with_suffix(".md")  # Zensical's name for it
        if not target.exists():
            lost.append(link)
            return found[0]
        source = target.relative_to(ROOT)
        anchor = link[len(path) :]
        if address:
            kind = "tree" if target.is_dir() else "blob"
            there = f"{address}/{kind}/main/{source}{anchor}"
        else:
            needed.add(source)
            there = os.path.relpath(_copy(source), here) + anchor
        return f'<a {before}href="{there}"{after}>{shown}</a>'

    return _LINK.sub(outer, text), lost, needed


def _shown(path: Path) -> str:
    """Returns a file of the repository, or the list of a folder, as HTML."""
    if (ROOT / path).is_dir():
        files = [file.name for file in sorted((ROOT / path).iterdir()) if _is_shown(file)]
        items = "".join(
            f'<li><a href="{path.name}/{name}.html">{html.escape(name)}</a></li>' for name in files
        )
        return f"<ul>{items}</ul>"
    pygments: Any = importlib.import_module("pygments")
    lexers: Any = importlib.import_module("pygments.lexers")
    try:
        lexer = lexers.get_lexer_for_filename(path.name)
    except lexers.ClassNotFound:
        lexer = lexers.TextLexer()
    return str(pygments.highlight((ROOT / path).read_text(), lexer, _formatter("default")))


def _is_shown(file: Path) -> bool:
    return file.is_file() and file.suffix in (".py", ".cpp", ".hpp", ".sh", ".txt", ".md", ".jsonl")


def _formatter(style: str) -> Any:
    html_formatter: Any = importlib.import_module("pygments.formatters").HtmlFormatter
    return html_formatter(style=style, linenos="inline", linespans="L", anchorlinenos=True)


def copy(paths: set[Path], site: Path) -> None:
    """Writes a page for each file of the repository and each folder, with the folder's files."""
    inside = {
        file.relative_to(ROOT)
        for path in paths
        if (ROOT / path).is_dir()
        for file in (ROOT / path).iterdir()
        if _is_shown(file)
    }
    colors = {
        name: _formatter(style).get_style_defs(".highlight")
        for name, style in (("colors", "default"), ("dark_colors", "github-dark"))
    }
    for path in paths | inside:
        there = site / _copy(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        home = os.path.relpath(site / "index.html", there.parent)
        there.write_text(_PAGE.format(path=path, home=home, body=_shown(path), **colors))


def main(folder: str) -> int:
    """Completes the pages of a site; returns the exit status."""
    site = Path(folder).resolve()
    address = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    problems = []
    needed: set[Path] = set()
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # its links are right at the site's address only
            continue
        text, lost, files = repaired(page, site, address[1] if address else "")
        page.write_text(text)
        needed |= files
        problems += [f"{page.relative_to(site)}: {link} leads to no file" for link in lost]
    copy(needed, site)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
