"""A progress bar on standard error, where that is a terminal and rich is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields a callable that moves the bar on by one.

    Args:
        title: Beside the bar.
        total: Steps to the end.
        shown: False on all ranks but one.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
    )
    # Drawn only when a turn has ended: a thread that draws by itself would disturb what is timed.
    with Progress(
        *columns,
        console=Console(stderr=True, soft_wrap=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(title, total=total)

        def advance() -> None:
            progress.update(task, advance=1, refresh=True)

        yield advance
