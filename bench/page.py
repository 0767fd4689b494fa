"""``python -m fastcoll.bench.page``: rewrites the tables of README and docs/ from the records in bench/results.

A table, or a picture and its caption, is between ``<!-- table NAME -->`` and ``<!-- end -->``. The text between these
marks is replaced, the rest stays. So no figure of a table can differ from its record. ``--pictures`` draws the pictures
that are older than their records. ``--check`` changes nothing, and ends with status 1 if a table or a picture differs
from its record.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fastcoll.bench import pictures, plot
from fastcoll.bench.tables import TABLES

__all__ = ["main", "rewritten"]

_ROOT = Path(__file__).resolve().parents[1]
_PICTURES = _ROOT / "docs" / "pictures"
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
            f"fastcoll.bench.page: expected the tables {', '.join(sorted(tables))}, each once, "
            f"got {', '.join(sorted(found))}"
        )
    gap = "\n" if page.startswith("docs/") else ""  # some renderers of docs/ need it
    return _TABLE.sub(
        lambda match: match[1] + gap + "\n".join(tables[match[2]]()) + "\n" + gap + match[3], text
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastcoll.bench.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check whether one would change")
    parser.add_argument(
        "--pictures", action="store_true", help="draw the pictures that are out of date"
    )
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.pictures and (problem := plot.missing()):
        parser.error(problem)
    old = {name: (_ROOT / name).read_text() for name in TABLES}
    new = {name: rewritten(text, name) for name, text in old.items()}
    stale = [name for name in TABLES if new[name] != old[name]]
    stale += pictures.stale(_PICTURES) if options.pictures else []
    if options.check and stale:
        flag = " --pictures" if options.pictures else ""
        print(
            f"fastcoll.bench.page: {', '.join(stale)}: not made of the records as they are. "
            f"Run `python -m fastcoll.bench.page{flag}`.",
            file=sys.stderr,
        )
        return 1
    for name in stale:
        if name in TABLES:
            (_ROOT / name).write_text(new[name])
        else:
            pictures.redraw(_PICTURES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
