"""The NCCL that CuPy loaded: its path, its version, and the functions that CuPy does not bind.

Nothing here loads a library: CuPy loads NCCL. Functions that CuPy lacks are looked up by name in the same library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastcoll._requirements import CUPY, nccl_packages
from fastcoll.cuda.shared_gpu import let_ranks_share_gpus

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = [
    "IN_PROGRESS",
    "NcclLibrary",
    "StatusError",
    "UniqueId",
    "UnusableNccl",
    "load",
    "mapped",
    "used",
    "version_text",
]

IN_PROGRESS = 7
"""NCCL's status for a call that continues after it has returned."""


class UniqueId(ctypes.Structure):
    """The id by which the ranks of a communicator find each other."""

    _fields_ = [("internal", ctypes.c_char * 128)]


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT_POINTER, _OUT_INT = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)

# Arguments of the functions called from here, and the first NCCL that has each. All return a status.
_FUNCTIONS: dict[str, tuple[list[Any], str]] = {
    "ncclGetVersion": ([_OUT_INT], "2.4"),
    "ncclCommInitRankConfig": ([_OUT_POINTER, _INT, UniqueId, _INT, _POINTER], "2.14"),
    "ncclCommSplit": ([_POINTER, _INT, _INT, _OUT_POINTER, _POINTER], "2.18"),
    "ncclCommUserRank": ([_POINTER, _OUT_INT], "2.2"),
    "ncclCommCount": ([_POINTER, _OUT_INT], "2.2"),
    "ncclCommGetAsyncError": ([_POINTER, _OUT_INT], "2.4"),
    "ncclCommAbort": ([_POINTER], "2.4"),
    "ncclCommDestroy": ([_POINTER], "2.2"),
    "ncclCommRegister": ([_POINTER, _POINTER, _SIZE, _OUT_POINTER], "2.19"),
    "ncclCommDeregister": ([_POINTER, _POINTER], "2.19"),
    "ncclCommWindowRegister": ([_POINTER, _POINTER, _SIZE, _OUT_POINTER, _INT], "2.27"),
    "ncclCommWindowDeregister": ([_POINTER, _POINTER], "2.27"),
}


class UnusableNccl(ImportError):
    """CuPy or NCCL is missing, or does not work here.

    Attributes:
        detail: What was expected and what was found.
        remedy: What to do.
    """

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(f"fastcoll: {detail}. {remedy}")
        self.detail = detail
        self.remedy = remedy


class StatusError(RuntimeError):
    """A function of NCCL returned another status than success.

    Attributes:
        status: NCCL's number.
    """

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} returned status {status}")
        self.status = status


@dataclass(frozen=True)
class MappedFile:
    """A file that this process has mapped, at least in part.

    Attributes:
        path: Its path when it was mapped.
        identity: Device and inode, because two paths to one file are one library.
    """

    path: str
    identity: tuple[str, str]


def mapped(maps: str = "/proc/self/maps") -> list[MappedFile]:
    """Returns the copies of NCCL in this process, each once, sorted by path."""
    found: dict[tuple[str, str], MappedFile] = {}
    with open(maps) as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6:
                continue
            path = fields[5].removesuffix(" (deleted)")
            if re.search(r"/libnccl\.so[^/]*$", path):
                identity = (fields[3], fields[4])
                found.setdefault(identity, MappedFile(path, identity))
    return sorted(found.values(), key=lambda one: one.path)


def used(copies: list[MappedFile], environ: str = "/proc/self/environ") -> MappedFile | None:
    """Returns the copy that serves both torch and CuPy, or None if they may use different copies.

    It is the only copy, or the first one that LD_PRELOAD named when this process began: the loader looks up every name
    there first, although a CUDA build of torch maps its own copy too.
    """
    if len(copies) == 1:
        return copies[0]
    with open(environ, "rb") as file:
        variables = [part.partition(b"=") for part in file.read().split(b"\0")]
    named = b" ".join(value for name, _, value in variables if name == b"LD_PRELOAD")
    for path in re.split(r"[:\s]+", os.fsdecode(named)):
        for copy in copies:
            if path and os.path.realpath(path) == os.path.realpath(copy.path):
                return copy
    return None


def version_text(code: int) -> str:
    """Returns "2.29.7" for 22907."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class NcclLibrary:
    """The functions of the library that CuPy calls.

    Attributes:
        path: The file it was loaded from.
        version: Its number, such as 22907.
        functions: The functions that C++ calls.
        cupy: CuPy's module for NCCL.
    """

    def __init__(self, path: str, cupy: ModuleType) -> None:
        self.path = path
        self.cupy = cupy
        self._library = _already_loaded(path)
        self._functions = {name: self._function(name) for name in _FUNCTIONS}
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version != cupy.get_version():
            raise UnusableNccl(
                f"expected CuPy to call the NCCL in {path}, which is {version_text(self.version)}, and it calls "
                f"{version_text(cupy.get_version())}",
                f"Start with LD_PRELOAD={path}, or uninstall what brings the other one",
            )

    @functools.cached_property
    def functions(self) -> CUDA.NcclFunctions:
        """The functions for callers in C++."""
        from fastcoll._load_cuda import CUDA  # fastcoll info comes without it

        return CUDA.NcclFunctions(self.address, self.version)

    def address(self, name: str) -> int:
        """Returns the address of an NCCL function; 0 if this NCCL has none of that name."""
        function = getattr(self._library, name, None)
        return 0 if function is None else ctypes.cast(function, _POINTER).value or 0

    def number(self, name: str, communicator: int) -> int:
        """Returns the number that an NCCL function reports of a communicator.

        Raises:
            StatusError: NCCL failed.
        """
        answer = ctypes.c_int()
        self.call(name, communicator, ctypes.byref(answer))
        return answer.value

    def _function(self, name: str) -> Any:
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes, function.restype = _FUNCTIONS[name][0], ctypes.c_int
        return function

    def call(self, name: str, *arguments: Any) -> None:
        """Calls an NCCL function.

        Raises:
            RuntimeError: This NCCL has no function of that name.
            StatusError: It returned another status than success.
        """
        function = self._functions[name]
        if function is None:
            raise RuntimeError(
                f"fastcoll: {self.path} has no {name}: expected NCCL {_FUNCTIONS[name][1]} or newer. "
                f"{nccl_packages()} --upgrade"
            )
        status = function(*arguments)
        if status != 0:
            raise StatusError(name, status)


@functools.cache
def load() -> NcclLibrary:
    """Imports CuPy, which loads NCCL, and returns the library.

    Raises:
        UnusableNccl: An ImportError: CuPy or NCCL is missing or does not load, or this process has two copies of
            NCCL.
    """
    if os.environ.get("FASTCOLL_SHARE_GPU") == "1":
        let_ranks_share_gpus()
    cupy = _import_cupy()
    copies = mapped()
    if not copies:
        raise UnusableNccl(
            "expected CuPy to load libnccl.so, and none is in /proc/self/maps", nccl_packages()
        )
    chosen = used(copies)
    if chosen is None:
        raise UnusableNccl(
            "expected one copy of NCCL in this process, found "
            + " and ".join(copy.path for copy in copies)
            + ", which do not share communicators",
            f"Start with LD_PRELOAD={copies[0].path}, or the other one, so torch and CuPy use the same copy. Or "
            "uninstall the package of one of them",
        )
    return NcclLibrary(chosen.path, cupy)


def _import_cupy() -> ModuleType:
    try:
        import cupy

        with warnings.catch_warnings():  # the same problem is raised below
            warnings.filterwarnings("ignore", r"\s*nccl library could not be loaded", UserWarning)
            from cupy.cuda import nccl

            if not nccl.available:  # at CuPy's first import; NCCL may have been installed since
                nccl = importlib.reload(nccl)
    except ImportError as error:
        raise UnusableNccl(
            f"expected CuPy, through which NCCL is reached, and it cannot be imported ({error})",
            nccl_packages(),
        ) from error
    if int(cupy.__version__.partition(".")[0]) < CUPY:
        raise UnusableNccl(
            f"expected CuPy {CUPY} or newer, got {cupy.__version__}, which cannot make a communicator of bytes",
            nccl_packages(),
        )
    if not nccl.available:
        reason = "for no reason given"
        try:
            import cupy_backends.cuda.libs.nccl  # noqa: F401
        except ImportError as error:
            reason = str(error)
        raise UnusableNccl(
            f"expected CuPy {cupy.__version__} to load NCCL, and it cannot ({reason})",
            nccl_packages(),
        )
    module: ModuleType = nccl
    return module


def _already_loaded(path: str) -> ctypes.CDLL:
    """Returns the library without loading another copy, even if its file was replaced since."""
    mode = os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        return ctypes.CDLL(path, mode=mode)
    except OSError:
        return ctypes.CDLL("libnccl.so.2", mode=mode)
