"""Builds fastcoll: the C++ extensions ``fastcoll._C`` and ``fastcoll._cuda``, and the Python packages around them.

The metadata are in pyproject.toml. This file has the parts that need code: the extensions, which compile
against the torch of the running environment, the requirement of that torch, and the map from packages to folders.
build_backend/ has the build backend and the code that both use.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

# Without this, `import torch` would call the entry point of an installed fastcoll.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))
import supported
import toolchain
from extension import BuildExtension, TorchExtension, with_cuda

SOURCES_ONLY = "sdist" in sys.argv  # needs no torch, and does not depend on it
TORCH, REQUIREMENT = "", supported.RANGE
if not SOURCES_ONLY:
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"fastcoll compiles against the torch it will run with, and none can be imported here ({error}): "
            f"install {supported.RANGE} first, then run `pip install --no-build-isolation .`"
        ) from None
    if problem := supported.problem(torch.__version__):
        raise SystemExit(problem)
    TORCH = supported.minor_of(torch.__version__)
    REQUIREMENT = supported.requirement(torch.__version__)

VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "fastcoll" / "_version.py").read_text(), re.MULTILINE
)[1]

# The packages below fastcoll, also those whose folders are beside it in the repository. They are listed here,
# because a search would also install a top-level `kernels`.
PACKAGES = {
    "fastcoll": "fastcoll",
    "fastcoll.cuda": "fastcoll/cuda",
    "fastcoll.cuda.algorithms": "fastcoll/cuda/algorithms",
    "fastcoll.ddp": "fastcoll/ddp",
    "fastcoll.fsdp": "fastcoll/fsdp",
    "fastcoll.trace": "fastcoll/trace",
    "fastcoll.kernels": "kernels",
    "fastcoll.bench": "bench",
    "fastcoll.examples": "examples",
}


class BuildFastcoll(BuildExtension):
    """Compiles the extensions, and records their torch beside them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip would give a new temporary folder each time. A lasting one lets ninja skip unchanged files.
        # One per torch and Python lets environments share a checkout.
        self.build_temp = str(ROOT / "build" / f"torch{TORCH}-{sys.implementation.cache_tag}")

    def run(self) -> None:
        # The environment's own ninja comes first, activated or not: two versions in turn on one build
        # folder would each start over.
        os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        if problem := toolchain.problem():
            raise SystemExit(problem)
        if not self.inplace:  # to be installed: without symbols, a fifth of the size
            for one in self.extensions:
                one.extra_link_args.append("-Wl,--strip-all")
        try:
            super().run()
        except subprocess.CalledProcessError:
            raise SystemExit(toolchain.failure()) from None
        target = ROOT / PACKAGES["fastcoll"] if self.inplace else Path(self.build_lib, "fastcoll")
        if "_cuda" not in MODULES:  # one of an earlier build would not fit
            Path(self.get_ext_fullpath("fastcoll._cuda")).unlink(missing_ok=True)
        record = {"fastcoll": VERSION, "torch": TORCH}
        (target / "_built_for.json").write_text(json.dumps(record) + "\n")


macros = {"FASTCOLL_VERSION": VERSION, "FASTCOLL_TORCH_VERSION": TORCH}

MODULES = [] if SOURCES_ONLY else ["_C", "_cuda"] if with_cuda() else ["_C"]

# Wheels for several releases of torch need different names to be in one folder.
LABEL = f"+torch{TORCH}" if TORCH and os.environ.get("FASTCOLL_VERSION_NAMES_TORCH") == "1" else ""

setup(
    version=VERSION + LABEL,
    install_requires=[REQUIREMENT],
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        "fastcoll": ["py.typed", "_C.pyi", "_cuda.pyi", "settings.def"],
        "fastcoll.examples": ["*.sh", "*.ipynb", "*/*.sh", "*/*.yaml", "*/Dockerfile"],
    },
    include_package_data=False,
    ext_modules=[TorchExtension(module, macros) for module in MODULES],
    cmdclass={"build_ext": BuildFastcoll},
    zip_safe=False,
)
