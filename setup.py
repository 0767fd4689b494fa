"""Builds fastcoll: the C++ extension ``fastcoll._C`` and the Python packages around it.

The metadata are in pyproject.toml; this file holds what needs code: the extension, which compiles
against the torch of the running environment, and the map from folders to packages.
"""

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

# Else `import torch` would call the entry point of a fastcoll that is installed already.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from setuptools import setup

try:
    import torch
except ImportError as error:
    raise SystemExit(
        f"fastcoll compiles against the torch it will run with, and none can be imported here ({error}): "
        "install torch>=2.11,<2.16 first, then run `pip install --no-build-isolation .`"
    ) from None

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from _build.extension import BuildExtension, TorchExtension

TORCH = ".".join(torch.__version__.split(".")[:2])  # c10d's ABI holds within one minor release
if not (2, 11) <= tuple(int(part) for part in TORCH.split(".")) < (2, 16):
    raise SystemExit(
        f"fastcoll is made for torch>=2.11,<2.16 and found torch {torch.__version__}: "
        "install one of these releases, then run `pip install --no-build-isolation .`"
    )
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "fastcoll" / "_version.py").read_text(), re.MULTILINE
)[1]

# Folders below fastcoll's roof, also those that stand beside it in the repository. Named one by one: a search
# would also install a top-level `kernels`.
PACKAGES = {
    "fastcoll": "fastcoll",
    "fastcoll.costs": "fastcoll/costs",
    "fastcoll.cuda": "fastcoll/cuda",
    "fastcoll.cuda.algorithms": "fastcoll/cuda/algorithms",
    "fastcoll.ddp": "fastcoll/ddp",
    "fastcoll.fsdp": "fastcoll/fsdp",
    "fastcoll.trace": "fastcoll/trace",
    "fastcoll.kernels": "kernels",
    "fastcoll.bench": "bench",
}


class BuildFastcoll(BuildExtension):
    """Records beside the extension which torch it is for."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip would give a new temporary folder each time; a lasting one lets ninja skip what is
        # unchanged, and one per torch and Python lets environments share a checkout.
        self.build_temp = str(ROOT / "build" / f"torch{TORCH}-{sys.implementation.cache_tag}")

    def run(self) -> None:
        # The environment's own ninja first, activated or not: two versions taking turns on one build
        # folder would each start over.
        os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        super().run()
        target = ROOT / PACKAGES["fastcoll"] if self.inplace else Path(self.build_lib, "fastcoll")
        record = {"fastcoll": VERSION, "torch": TORCH}
        (target / "_built_for.json").write_text(json.dumps(record) + "\n")


extension = TorchExtension(
    "fastcoll._C", {"FASTCOLL_VERSION": VERSION, "FASTCOLL_TORCH_VERSION": TORCH}
)

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"fastcoll": ["py.typed", "_C.pyi", "default_tuning.json"]},
    include_package_data=False,
    ext_modules=[extension],
    cmdclass={"build_ext": BuildFastcoll},
    zip_safe=False,
)
