"""fastcoll for groups that name another backend, or none: ``FASTCOLL_DEFAULT`` and ``FASTCOLL_REPLACE``.

Some frameworks choose the backend themselves: torch's default for the device, or "gloo" by its name. Their users have
no argument for it. These settings are read when torch is imported, so no line of a script changes::

    FASTCOLL_DEFAULT=1 torchrun ... script.py        # a program that names no backend gets fastcoll for CPU tensors
    FASTCOLL_REPLACE=gloo torchrun ... script.py     # a program that names gloo gets fastcoll

Both change the class ``torch.distributed.Backend``, which maps every backend name, and its default backends. With gloo
replaced, the class ``dist.ProcessGroupGloo`` changes too, because some frameworks make a group's backend themselves, as
``dist.ProcessGroupGloo(store, rank, size)``. They then get a backend of fastcoll. Gloo stays where torch itself makes
such a backend, as for RPC, and where options of Gloo are given, as by fastcoll between hosts.

For such a group ``dist.get_backend()`` returns "fastcoll", which is equal to "gloo" too (``ServedName``). So code that
compares the name goes on as with gloo. With another name, Ignite would leave a model without DDP, with no warning, and
``dist.monitored_barrier`` would raise an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._register import NAME, register

__all__ = ["ServedName", "apply", "make_default", "replace", "replaced"]

DEVICES = ("cpu", "cuda")
REPLACEABLE = ("gloo", "nccl")


class ServedName(str):
    """The name of the backend that serves a group; also equal to the name that the program gave."""

    served: str  # this string itself: torch 2.11 cannot compile str() of a subclass
    asked: str

    def __new__(cls, served: str, asked: str) -> ServedName:
        """Makes the name ``served``, equal to ``asked``."""
        name = super().__new__(cls, served)
        name.served, name.asked = served, asked
        return name

    def __eq__(self, other: object) -> bool:
        return self.served == other or self.asked == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedName, (self.served, self.asked)


_replaced: set[str] = set()
_told: set[str] = set()


def make_default(devices: str | Iterable[str] = ("cpu",)) -> None:
    """Makes fastcoll the backend of all later groups that name no backend.

    ``FASTCOLL_DEFAULT=1`` does the same for the CPU, and ``FASTCOLL_DEFAULT=cpu,cuda`` for both. If torch finds an
    accelerator, a group without a backend's name serves that device only. NCCL then serves it, unless ``devices``
    contains "cuda".

    Args:
        devices: "cpu", "cuda" or both.

    Raises:
        ValueError: ``devices`` contains another word.
    """
    chosen = _checked(devices, DEVICES, "fastcoll.make_default: expected devices")
    register()
    for device in chosen:
        dist.Backend.default_device_backend_map[device] = NAME
    _serve_names()


def replace(backends: str | Iterable[str] = ("gloo",)) -> None:
    """Makes fastcoll serve all later groups that name one of these backends.

    ``FASTCOLL_REPLACE=gloo`` does the same when torch is imported.

    Args:
        backends: "gloo", "nccl" or both.

    Raises:
        ValueError: Another backend is among them.
    """
    chosen = _checked(backends, REPLACEABLE, "fastcoll.names.replace: expected backends")
    register()
    _replaced.update(chosen)
    _serve_names()
    if "gloo" in chosen:
        _serve_class()


def replaced() -> tuple[str, ...]:
    """Returns the backends that fastcoll replaces."""
    return tuple(sorted(_replaced))


def apply(environ: Mapping[str, str] = os.environ) -> None:
    """Applies FASTCOLL_DEFAULT and FASTCOLL_REPLACE.

    Raises:
        ValueError: The value of a variable is not allowed; the message names the variable.
    """
    default = _words(environ.get("FASTCOLL_DEFAULT", ""))
    if default and default != ["0"]:
        try:
            make_default(["cpu"] if default == ["1"] else default)
        except ValueError:
            raise ValueError(
                f"FASTCOLL_DEFAULT={environ['FASTCOLL_DEFAULT']}: expected 1, 0, or devices of "
                f"{', '.join(DEVICES)} with commas between. Correct or unset the variable."
            ) from None
    if names := _words(environ.get("FASTCOLL_REPLACE", "")):
        try:
            replace(names)
        except ValueError:
            raise ValueError(
                f"FASTCOLL_REPLACE={environ['FASTCOLL_REPLACE']}: expected backends of "
                f"{', '.join(REPLACEABLE)} with commas between. Correct or unset the variable."
            ) from None


def _checked(given: str | Iterable[str], allowed: tuple[str, ...], expected: str) -> list[str]:
    """Returns one word or several as a list; ValueError if one is not allowed."""
    words = [given] if isinstance(given, str) else list(given)
    for word in words:
        if word not in allowed:
            raise ValueError(f"{expected} of {', '.join(allowed)}, got {word!r}")
    return words


def _words(text: str) -> list[str]:
    return [word.strip().lower() for word in text.split(",") if word.strip()]


def _serve_names() -> None:
    """Wraps torch's mapping from a name to a backend, once."""
    torchs: Any = dist.Backend.__new__
    if getattr(torchs, "of_fastcoll", False):
        return

    def new(cls: type[dist.Backend], name: str) -> Any:
        return name if isinstance(name, ServedName) else _served(torchs(cls, name))

    new.of_fastcoll = True  # type: ignore[attr-defined]
    dist.Backend.__new__ = staticmethod(new)  # type: ignore[method-assign]


def _serve_class() -> None:
    """Puts a class into the place of torch's ``ProcessGroupGloo``, once, that makes backends of fastcoll."""
    if not dist.is_gloo_available() or hasattr(dist.ProcessGroupGloo, "of_fastcoll"):
        return
    torchs: Any = dist.ProcessGroupGloo

    class Meta(type(torchs)):  # type: ignore[misc]
        def __call__(cls, *arguments: Any, **named: Any) -> Any:
            if cls is not served:  # a subclass of the program
                return super().__call__(*arguments, **named)
            given = dict(zip(("store", "rank", "size", "timeout"), arguments, strict=False)) | named
            timeout = given.get("timeout")
            plain = given.keys() <= {"store", "rank", "size", "timeout"}
            plain = plain and isinstance(timeout, timedelta | None) and len(arguments) <= 4
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not plain or caller.partition(".")[0] == "torch":
                return torchs(*arguments, **named)
            from fastcoll._backend import create_without_group

            _tell(["gloo"])
            return create_without_group(**given)

        def __instancecheck__(cls, value: object) -> bool:
            if cls is not served:
                return bool(super().__instancecheck__(value))
            return isinstance(value, torchs) or _made_by_class(value)

    body = {"of_fastcoll": True, "__doc__": torchs.__doc__, "__module__": torchs.__module__}
    served = Meta(torchs.__name__, (torchs,), body)
    for module in (dist, dist.distributed_c10d):
        setattr(module, torchs.__name__, served)


def _made_by_class(value: object) -> bool:
    """Whether a backend of fastcoll was made as torch's ``ProcessGroupGloo``, for code of torch that asks for it."""
    if type(value).__name__ != "ProcessGroupFastcoll":
        return False
    return bool(value.options.group_name == "ProcessGroupGloo")  # type: ignore[attr-defined]


def _served(name: str) -> str:
    """Returns the name of the backend that serves groups of a name, as torch spells it.

    "cpu:gloo,cuda:nccl" is mapped part by part. "undefined" is torch's word for no name, and selects the default.
    """
    if name == dist.Backend.UNDEFINED:
        device = torch._C._get_accelerator().type
        default = dist.Backend.default_device_backend_map.get(device, name)
        if default in _replaced:
            _tell([default])
            return ServedName(NAME, default)
        return NAME if default == NAME else name
    parts = [part.rpartition(":") for part in name.split(",")]
    if not any(backend in _replaced for _, _, backend in parts):
        return name
    _tell(sorted({backend for _, _, backend in parts} & _replaced))
    served = ",".join(
        f"{device}{colon}{NAME if backend in _replaced else backend}"
        for device, colon, backend in parts
    )
    return ServedName(served, name)


def _tell(backends: list[str]) -> None:
    """Prints once, on the job's first rank, which backends fastcoll replaces."""
    fresh = [backend for backend in backends if backend not in _told]
    _told.update(fresh)
    if fresh and os.environ.get("RANK", "0") == "0":
        text = f"serves the groups that name {' or '.join(fresh)} (FASTCOLL_REPLACE)"
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(f"[fastcoll] {text}", file=sys.stderr)
