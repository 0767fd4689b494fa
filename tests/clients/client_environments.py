"""An environment for each framework, below .clients/: its packages over those of the environment in use.

torch, and fastcoll, are the ones that are there: pip sees them and fetches none.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = ROOT / ".clients"
_STAMP = "installed.json"


def python(name: str) -> Path:
    """Return the interpreter of an environment."""
    return _FOLDER / name / "bin" / "python"


def extensions(name: str) -> Path:
    """Return where what the frameworks compile when they run is kept (TORCH_EXTENSIONS_DIR)."""
    return _FOLDER / name / "extensions"


def install(name: str, packages: tuple[str, ...], prepare: str = "") -> None:
    """Make an environment, unless it is there with these very packages.

    prepare is Python that then runs there once: what would else be compiled by the first training.

    Raises CalledProcessError, with what pip printed, if they cannot be installed.
    """
    folder = _FOLDER / name
    stamp = folder / _STAMP
    wanted = [sys.executable, sys.version, version("torch"), *packages, prepare]
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return
    _run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
    _look_into_parent(name)
    if packages:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write(f"torch=={version('torch')}\n")
            constraints.flush()
            pip = [sys.executable, "-m", "pip", "--python", str(python(name)), "install"]
            quiet = ["--quiet", "--disable-pip-version-check", "--no-build-isolation"]
            _run(*pip, *quiet, "--constraint", constraints.name, *packages)
    if prepare:
        _run(str(python(name)), "-c", prepare, TORCH_EXTENSIONS_DIR=str(extensions(name)))
    stamp.write_text(json.dumps(wanted))


def _look_into_parent(name: str) -> None:
    """Let the environment find what this one has, editable installations too, after its own."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run(str(python(name)), "-c", ask).strip())
    parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in sorted(parents)]
    (site / "parent.pth").write_text("".join(lines))


def _run(*command: str, **variables: str) -> str:
    ended = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        raise subprocess.CalledProcessError(ended.returncode, command, ended.stdout)
    return ended.stdout
