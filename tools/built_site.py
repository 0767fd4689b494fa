"""``python tools/built_site.py build/site``: checks the links of a built site, and repairs those that leave it.

A page links to sources and records by relative paths, which are right on GitHub. In the site such a link gets the
repository's address, ``repo_url`` of mkdocs.yml, or becomes plain text if there is no address. The program prints one
line for each broken link, and ends with status 1 if there is one.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r'<a ([^>]*?)href="([^"]*)"([^>]*)>(.*?)</a>', re.DOTALL)
_FILE = re.compile(r'(?:src|srcset)="([^"]*)"')


def _path(link: str) -> str:
    """Returns the path of a relative link, or "" for any other."""
    path = link.partition("#")[0].partition("?")[0]
    return "" if re.match(r"[a-z]+:|/", path) else path


def repaired(page: Path, site: Path, address: str) -> tuple[str, list[str]]:
    """Returns the text of a page of the site with its outer links repaired, and its broken links.

    Args:
        page: The page's file.
        site: The folder of the site, which has the layout of docs/.
        address: The repository's address, "" if it has none.
    """
    text = page.read_text()
    here = Path("docs") / page.parent.relative_to(site)
    lost = [path for path in map(_path, _FILE.findall(text)) if not (page.parent / path).exists()]

    def outer(found: re.Match[str]) -> str:
        before, link, after, shown = found.groups()
        path = _path(link)
        if not path or (page.parent / path).exists():
            return found[0]
        target = ROOT / os.path.normpath(here / path)
        if not target.exists():
            target = target.with_suffix(".md")  # Zensical's name for it
        if not target.exists():
            lost.append(link)
            return found[0]
        if not address:
            return shown
        kind = "tree" if target.is_dir() else "blob"
        anchor = link[len(path) :]
        there = f"{address}/{kind}/main/{target.relative_to(ROOT)}{anchor}"
        return f'<a {before}href="{there}"{after}>{shown}</a>'

    return _LINK.sub(outer, text), lost


def main(folder: str) -> int:
    """Repairs the pages of a site; returns the exit status."""
    site = Path(folder).resolve()
    address = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    problems = []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # its links are right at the site's address only
            continue
        text, lost = repaired(page, site, address[1] if address else "")
        page.write_text(text)
        problems += [f"{page.relative_to(site)}: {link} leads to no file" for link in lost]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
