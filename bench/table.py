"""Tables of measurements: lines for a terminal, printed row by row as they are measured, or Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Column", "Table", "markdown", "times_text"]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: The first line of the head.
        width: Least number of characters. Text is at the right, or with a negative width at the left.
        digits: Decimals of floating-point numbers.
        unit: The second line of the head.
    """

    title: str
    width: int
    digits: int = 2
    unit: str = ""

    def text(self, cell: str | float | None) -> str:
        """Returns a cell, filled to the width; None is "-"."""
        text = f"{cell:.{self.digits}f}" if isinstance(cell, float) else str(cell)
        text = "-" if cell is None else text
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """Lines with a cell for each column."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns

    def head(self) -> list[str]:
        """Returns the lines above the rows: titles, and units if a column has one."""
        titles, units = ([getattr(c, name) for c in self._columns] for name in ("title", "unit"))
        return [self.row(titles), *([self.row(units)] if any(units) else [])]

    def row(self, cells: Sequence[str | float | None]) -> str:
        """Returns the line of a row."""
        texts = (column.text(cell) for column, cell in zip(self._columns, cells, strict=True))
        return " ".join(texts).rstrip()


def times_text(ratio: float | None) -> str:
    """Returns a ratio as "1.25x"; None is "-"."""
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def markdown(head: str, rows: Sequence[Sequence[str]], text: int = 1) -> list[str]:
    """Returns a table in Markdown whose first columns are text and the others numbers; the head has `|` between."""
    rule = ["---" if column < text else "--:" for column in range(head.count("|") + 1)]
    return ["| " + " | ".join(cells) + " |" for cells in ([head], rule, *rows)]
