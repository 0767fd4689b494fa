"""A progress bar on standard error, if that is a terminal and rich is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields a callable that advances the bar by one of `total` steps; without `shown`, it does nothing."""
    if not (shown and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn only at the end of a turn, because a drawing thread would disturb the timed calls.
    with Progress(
        console=Console(stderr=True, soft_wrap=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.update(task, advance=1, refresh=True)
