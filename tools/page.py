"""``python tools/page.py``: rewrites the tables of README and docs/ from the records in bench/results.

A table, or a picture and its caption, is between ``<!-- table NAME -->`` and ``<!-- end -->``. The text between these
marks is replaced, the rest stays. So no figure of a table can differ from its record. Pictures that are older than
their records are drawn again, which needs matplotlib. Nothing here needs torch.
"""

from __future__ import annotations

import re

import pictures
from repository import ROOT
from tables import TABLES

__all__ = ["differences", "main", "rewritten"]

_PICTURES = ROOT / "docs" / "pictures"
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str, page: str) -> str:
    """Returns the text of a page, named by its path, with its tables rewritten.

    Raises:
        ValueError: The text has a table that is not in the page's ``TABLES``, or lacks one of them.
    """
    tables = TABLES[page]
    found = [match[1] for match in _TABLE.findall(text)]
    if sorted(found) != sorted(tables):
        raise ValueError(
            f"tools/page.py: expected the tables {', '.join(sorted(tables))}, each once, "
            f"got {', '.join(sorted(found))}"
        )
    gap = "\n" if page.startswith("docs/") else ""  # some renderers of docs/ need it
    return _TABLE.sub(
        lambda match: match[1] + gap + "\n".join(tables[match[2]]()) + "\n" + gap + match[3], text
    )


def _rewritten_pages() -> dict[str, str]:
    """Returns the new texts of the pages that differ from them."""
    old = {name: (ROOT / name).read_text() for name in TABLES}
    new = {name: rewritten(text, name) for name, text in old.items()}
    return {name: text for name, text in new.items() if text != old[name]}


def differences() -> list[str]:
    """Returns the pages and pictures that are not made of the records as they are."""
    return [*_rewritten_pages(), *pictures.stale(_PICTURES)]


def main() -> None:
    """Rewrites pages and draws pictures."""
    for name, text in _rewritten_pages().items():
        (ROOT / name).write_text(text)
    for name in pictures.stale(_PICTURES):
        pictures.redraw(_PICTURES / name)


if __name__ == "__main__":
    main()
