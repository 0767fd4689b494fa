"""The threads of this process, C++ threads included."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def in_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Run the functions at once, a thread each; return what they raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        running = [pool.submit(function) for function in functions]
    return [error for one in running if (error := one.exception())]


def thread_names() -> list[str]:
    """Return the name of each thread; a thread that ends meanwhile is left out."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names
