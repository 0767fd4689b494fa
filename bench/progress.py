"""A progress bar on standard error, where that is a terminal and rich is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields a callable that moves the bar, of so many steps, on by one; it is shown on one rank."""
    if not (shown and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn only when a turn has ended: a thread that draws by itself would disturb what is timed.
    with Progress(
        console=Console(stderr=True, soft_wrap=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.update(task, advance=1, refresh=True)
