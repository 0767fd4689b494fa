"""The NCCL that CuPy loaded: its path, its version, the functions that CuPy does not bind, and errors for statuses.

Nothing here loads a library: CuPy loads NCCL. Functions that CuPy lacks are looked up by name in the same library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastcoll._built_for import Unusable
from fastcoll._requirements import CUPY, nccl_packages

if TYPE_CHECKING:
    import torch.distributed as dist

    from fastcoll._load_cuda import CUDA
    from fastcoll.cuda.errors import Member

__all__ = [
    "IN_PROGRESS",
    "NcclLibrary",
    "StatusError",
    "UniqueId",
    "UnusableNccl",
    "finish",
    "let_ranks_share_gpus",
    "load",
    "mapped",
    "settle",
    "translated",
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


class UnusableNccl(Unusable):
    """CuPy or NCCL is missing, or does not work here."""

    form = "fastcoll: {}. {}"


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
        self._functions = {name: getattr(self._library, name, None) for name in _FUNCTIONS}
        for name, function in self._functions.items():
            if function is not None:
                function.argtypes, function.restype = _FUNCTIONS[name][0], ctypes.c_int
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


# --- several ranks on one GPU ---------------------------------------------------------------------

_ONE_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
}
"""NCCL's variables if all ranks are on this host."""

_ALWAYS = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",  # the kernels of all ranks wait on one GPU
}


def let_ranks_share_gpus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets NCCL's variables so that ranks may share a GPU (``FASTCOLL_SHARE_GPU=1``); call it before NCCL is loaded.

    It is to debug a job of many GPUs. NCCL refuses two ranks of a host on one GPU ("Duplicate GPU detected"). It takes
    the host's name from ``NCCL_HOSTID``. With a name for each process, each rank counts as a host, and data goes
    through NCCL's sockets. The GPU runs the processes in time slices, so such a job shows results, memory and errors,
    but no speed. A variable that is set stays as it is.
    """
    ours = {"NCCL_HOSTID": f"{socket.gethostname()}-{os.getpid()}", **_ALWAYS}
    ranks, here = environ.get("WORLD_SIZE"), environ.get("LOCAL_WORLD_SIZE")
    if ranks is not None and ranks == here:
        ours.update(_ONE_HOST)
    for name, value in ours.items():
        environ.setdefault(name, value)


# --- statuses ------------------------------------------------------------------------------------

_SHORTEST, _LONGEST = 0.0001, 0.02  # seconds between two polls of a call in progress


def _status_of(library: NcclLibrary, error: BaseException) -> int | None:
    """Returns the status behind an exception; None if it is about something else.

    CuPy has no names for the statuses 7 (in progress) and 8 (timed out) and raises KeyError with the number.
    """
    if isinstance(error, (library.cupy.NcclError, StatusError)):
        return int(error.status)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return None


def translated(library: NcclLibrary, member: Member, what: str, error: Exception) -> Exception:
    """Returns the exception to raise in place of CuPy's; the same one if it is not about a status."""
    status = _status_of(library, error)
    return error if status is None else member.fault(what, library.functions.describe(status))


def finish(library: NcclLibrary, member: Member, what: str, result: Callable[[], object]) -> None:
    """Takes the result of a call that NCCL may continue after it has returned; `result` raises what the call raised.

    Raises:
        DistBackendError: The call failed.
    """
    try:
        result()
    except Exception as error:
        if _status_of(library, error) != IN_PROGRESS:
            raise translated(library, member, what, error) from None


def settle(
    library: NcclLibrary,
    member: Member,
    what: str,
    communicator: int,
    end: float,
    late: Callable[[str], dist.DistBackendError],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until a communicator is no longer in progress, or until `end` on the clock of ``time.monotonic``.

    `late` makes the error for a wait that timed out. `check` is called before each poll; it raises if the communicator
    was aborted, because its memory is then freed.

    Raises:
        DistBackendError: The call failed, or was still in progress at the end.
    """
    pause = _SHORTEST
    while True:
        check()
        try:
            status = library.number("ncclCommGetAsyncError", communicator)
        except StatusError as error:
            raise translated(library, member, what, error) from None
        if status != IN_PROGRESS:
            break
        if time.monotonic() >= end:
            raise late("NCCL is still running; set NCCL_DEBUG=INFO to see what it waits for")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    if status:
        raise member.fault(what, library.functions.describe(status))
