"""Builds the stand-in for NCCL: ``python tests/fake_nccl/build.py`` prints the path of the library."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGET = FOLDER.parents[1] / "build" / "fake_nccl"
SONAME = "libnccl.so.2"
FLAGS = ["-std=c11", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def build(folder: Path = TARGET) -> Path:
    """Compile what has changed and return the path of the library.

    The library's folder is named after a hash of its sources, so a library in use is never replaced.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "tests/fake_nccl needs a C compiler, such as gcc: install one, or set CC"
        )
    sources = sorted(FOLDER.glob("*.c"))
    command = [compiler, *FLAGS, *WARNINGS, f"-Wl,-soname,{SONAME}", *map(str, sources), "-lm"]
    content = b"".join(path.read_bytes() for path in [*sources, FOLDER / "fake_nccl.h"])
    key = hashlib.sha256(content + " ".join(command).encode()).hexdigest()[:12]
    library = folder / key / SONAME
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_name(f"{SONAME}.{os.getpid()}")
        subprocess.run([*command, "-o", str(new)], check=True)
        new.replace(library)
    return library


if __name__ == "__main__":
    print(build())
