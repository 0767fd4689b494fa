"""The copy of the tree that mutants.py builds and tests: build/mutants/tree."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants" / "tree"
PACKAGE = COPY / "build" / "package"
CLEAN = COPY.parent / "clean"

BUILD_SECONDS = 1200


class Unusable(Exception):
    """A defect, or the copy, cannot be tested."""


def run(command: Sequence[str | Path], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Returns the exit status (None if it took too long) and the output of a command. Kills all that it started."""
    # File by file: a defect recompiles its own file only.
    environ = {**os.environ, "PYTHONPATH": str(PACKAGE), "UNITY": "0", "USE_CUDA": "1"}
    with open(COPY.parent / "output.txt", "w+b") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def synchronize() -> None:
    """Makes the copy equal to the tree without touching equal files, because ninja compares file times."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    wanted = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        source, target = ROOT / name, COPY / name
        if target.exists() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for path in COPY.rglob("*"):
        name = path.relative_to(COPY).as_posix()
        is_made = name.startswith("build/") or name.endswith((".so", "_built_for.json", ".pyc"))
        if path.is_file() and name not in wanted and not is_made:
            path.unlink()


def build() -> None:
    """Compiles what has changed in the copy.

    Raises:
        Unusable: The copy does not compile.
    """
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    status, output = run(command, COPY, BUILD_SECONDS)
    if status != 0:
        raise Unusable(f"the copy does not compile:\n{output[-3000:]}")


def make_package() -> None:
    """Makes the folder from which `import fastcoll` imports the copy, and checks it.

    Raises:
        Unusable: Another fastcoll is found.
    """
    subprocess.run(["bash", COPY / "tools" / "link_package.sh"], check=True)
    names = (
        "fastcoll",
        "fastcoll._C",
        "fastcoll._cuda",
        "fastcoll.kernels",
        "fastcoll.bench",
        "fastcoll.ddp",
    )
    question = f"import {', '.join(names)}\nfor m in ({', '.join(names)}): print(m.__file__)"
    status, output = run([sys.executable, "-c", question], PACKAGE, 120)
    places = output.split()
    inside = [Path(place).resolve().is_relative_to(COPY.resolve()) for place in places]
    if status != 0 or len(inside) != len(names) or not all(inside):
        raise Unusable(f"the tests would not run on the copy {COPY}:\n{output}")


def keep_outputs(source: Path, target: Path) -> None:
    """Copies the outputs of a build with their file times, which ninja compares."""
    for path in [*source.glob("build/torch*/**/*"), *source.glob("fastcoll/*.so")]:
        there = target / path.relative_to(source)
        if not path.is_file() or path.suffix == ".gch":  # large, and never changed
            continue
        if not there.exists() or there.stat().st_mtime_ns != path.stat().st_mtime_ns:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)
