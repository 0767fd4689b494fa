"""Communicators that CuPy cannot make: with a config, and parts. They are made by the library that CuPy loaded.

CuPy's constructors take no config, and CuPy loses a part whose split continues after the call has returned.

NCCL's ``ncclConfig_t`` begins with its size and a version, and new fields are added at its end. A library reads the
fields that it supports and ignores the rest. So one layout serves all versions, and only a set field that the library
does not support is an error.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Mapping
from typing import TypeGuard

from fastcoll._requirements import nccl_packages
from fastcoll.cuda.nccl_library import NcclLibrary, UniqueId, version_text

__all__ = ["LibraryCommunicator", "NcclConfig", "check_config", "is_set", "shares"]

_MAGIC = 0xCAFEBEEF
_NOT_SET = -(2**31)  # NCCL's value for an unset number

_TEXTS = ("netName", "commName")

# The fields behind `blocking`, in NCCL's order: its name for each, and the first version that has it.
_FIELDS = {
    "cga_cluster_size": ("cgaClusterSize", 21700),
    "min_ctas": ("minCTAs", 21700),
    "max_ctas": ("maxCTAs", 21700),
    "net_name": ("netName", 21700),
    "split_share": ("splitShare", 21800),
    "traffic_class": ("trafficClass", 22500),
    "comm_name": ("commName", 22700),
    "collnet_enable": ("collnetEnable", 22700),
    "cta_policy": ("CTAPolicy", 22700),
    "shrink_share": ("shrinkShare", 22700),
    "nvls_ctas": ("nvlsCTAs", 22700),
    "n_channels_per_net_peer": ("nChannelsPerNetPeer", 22800),
    "nvlink_centric_sched": ("nvlinkCentricSched", 22800),
}


class NcclConfig:
    """The fields of NCCL's ncclConfig_t, by the names of torch's ``ProcessGroupNCCL.NCCLConfig``; None: not set.

    NCCL's documentation describes the fields; its environment variables win over them. ``blocking`` is missing,
    because no call of fastcoll waits for NCCL longer than the group's timeout.

    Args:
        given: An object with some of these fields, which are copied. Another field that is set is ignored with a
            warning.
    """

    __slots__ = tuple(_FIELDS)
    net_name: str | None
    split_share: int | None

    def __init__(self, given: object = None) -> None:
        for name in _FIELDS:
            value = getattr(given, name, None)
            setattr(self, name, None if value == _NOT_SET else value)
        for name in dir(given):
            if name.startswith("_") or name in _FIELDS or name == "blocking":
                continue
            value = getattr(given, name)
            if value not in (None, _NOT_SET) and not callable(value):
                warnings.warn(
                    f"fastcoll.Options ignores config.{name} = {value!r}: fastcoll has no such field. Leave it out, "
                    "or set NCCL's environment variable for it.",
                    stacklevel=2,
                )


class _NativeConfig(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        *(
            (member, ctypes.c_void_p if member in _TEXTS else ctypes.c_int)
            for member, _ in _FIELDS.values()
        ),
    ]


def is_set(config: NcclConfig | None) -> TypeGuard[NcclConfig]:
    """Returns whether there is a config with any field set."""
    return config is not None and any(getattr(config, name) is not None for name in _FIELDS)


def shares(config: NcclConfig | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether NCCL lets parts share the resources of a communicator with this config.

    NCCL's variable wins over the field.
    """
    given = environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "")
    if given in ("0", "1"):
        return given == "1"
    return config is not None and config.split_share == 1


def check_config(library: NcclLibrary, config: NcclConfig | None) -> None:
    """Checks that the library supports the fields that are set.

    Raises:
        ValueError: A field is newer than the library, which would ignore it.
    """
    for name, (_, since) in _FIELDS.items():
        if getattr(config, name, None) is not None and library.version < since:
            raise ValueError(
                f"fastcoll.Options: expected NCCL {version_text(since)} or newer for config.{name}, got "
                f"{version_text(library.version)}. Leave it out, or {nccl_packages()} --upgrade"
            )


def _native(library: NcclLibrary, config: NcclConfig) -> _NativeConfig:
    native = _NativeConfig(size=ctypes.sizeof(_NativeConfig), magic=_MAGIC, version=library.version)
    native.blocking = _NOT_SET
    for name, (member, _) in _FIELDS.items():
        value = getattr(config, name)
        if member not in _TEXTS:
            value = _NOT_SET if value is None else value
        elif value is not None:  # NCCL keeps the pointer for good, and does not free it
            value = _copied(value)
        setattr(native, member, value)
    return native


def _copied(text: str) -> int | None:
    duplicate = ctypes.CDLL(None).strdup
    duplicate.argtypes, duplicate.restype = [ctypes.c_char_p], ctypes.c_void_p
    address: int | None = duplicate(text.encode())
    return address


class LibraryCommunicator:
    """A communicator that NCCL makes without CuPy, with the methods of CuPy's that this package calls.

    Args:
        library: NCCL.
    """

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()

    @property
    def comm(self) -> int:
        """NCCL's handle; 0 before it is made and after its end. It is set while ``make`` still waits."""
        return self._handle.value or 0

    def make(self, size: int, unique_id: bytes, rank: int, config: NcclConfig) -> None:
        """Makes the communicator, together with all ranks.

        Raises:
            StatusError: NCCL failed, or is still in progress.
        """
        ident = UniqueId.from_buffer_copy(unique_id)
        native = _native(self._library, config)
        self._library.call(
            "ncclCommInitRankConfig",
            *(ctypes.byref(self._handle), size, ident, rank, ctypes.byref(native)),
        )

    def make_part(self, whole: int, color: int, key: int, config: NcclConfig | None) -> None:
        """Splits a communicator, together with its ranks, and becomes this rank's part; it stays 0 for color -1.

        Args:
            whole: Handle of the communicator to split.
            color: Ranks with the same color share a part; -1: none for this rank.
            key: Orders the ranks in the part.
            config: NCCL config of the part; if no field is set, that of the whole.

        Raises:
            StatusError: NCCL failed, or is still in progress.
        """
        native = ctypes.byref(_native(self._library, config)) if is_set(config) else None
        self._library.call("ncclCommSplit", whole, color, key, ctypes.byref(self._handle), native)

    def abort(self) -> None:
        """Ends all calls and the communicator."""
        self._end("ncclCommAbort")

    def destroy(self) -> None:
        """Ends the communicator after its calls."""
        self._end("ncclCommDestroy")

    def _end(self, name: str) -> None:
        handle, self._handle.value = self.comm, None
        if handle:
            self._library.call(name, handle)
