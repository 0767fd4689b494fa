"""The tuning table of this host: at which sizes one way of doing a collective gives way to another.

``python -m fastcoll.tune`` measures a table and writes it where :func:`load` finds it. A table counts only
on the machine that it names, so that a home folder shared by different machines does no harm. All ranks of
a group must use the same table; the rendezvous refuses anything else.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll import env
from fastcoll._load import C
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

__all__ = ["FIELDS", "SHIPPED", "Loaded", "host_path", "load", "machine_name", "parse"]

SHIPPED = Path(__file__).with_name("default_tuning.json")
FIELDS = tuple(name for name in dir(C.Tuning) if name.endswith("_bytes"))
_ANEW = "Write the table anew with `python -m fastcoll.tune`."
_MOST = 1 << 62


@dataclass(frozen=True)
class Loaded:
    """A table and where it comes from.

    Attributes:
        table: As ``fastcoll.Options(tuning=...)`` takes it.
        source: The file.
        machine: On which it was measured.
        device: The section on all-reduces of device tensors; not to be used where the table has none.
        device_name: Of the devices on which that was measured; "" where the table has none.
    """

    table: C.Tuning
    source: Path
    machine: str
    device: Thresholds = DEFAULT
    device_name: str = ""

    def thresholds_on(self, name: str) -> Thresholds:
        """Returns the section for devices of that name; where it was measured on others, that kernels take nothing."""
        return self.device if name == self.device_name else DEFAULT


def machine_name() -> str:
    """Returns what of this machine a table depends on: processor, cores and caches."""
    caches = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            caches.append(f"L{level} {size}")
    try:
        found = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    cpu = found[1].strip() if found else platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {', '.join(caches) or 'caches unknown'}"


def host_path() -> Path:
    """Returns where the table of this host is kept, by the XDG base directory specification."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "fastcoll" / "tuning.json"


def parse(text: str, source: Path) -> Loaded:
    """Reads a table.

    Raises:
        ValueError: It is not one; the message names the file and what is wrong.
    """
    try:
        record: Any = json.loads(text)
        machine, values = record["machine"], record["table"]
        unknown = sorted(set(values) ^ set(FIELDS))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source}: expected a tuning table as `python -m fastcoll.tune` writes it, "
            f"got what cannot be read as one ({type(error).__name__}: {error})"
        ) from None
    if unknown:
        raise ValueError(
            f"{source}: expected a tuning table of {', '.join(FIELDS)}; missing or unknown: "
            f"{', '.join(unknown)}. Write it anew with `python -m fastcoll.tune`."
        )
    table = C.Tuning()
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ValueError(
                f"{source}: expected {name} to be a number of bytes, got {value!r}. {_ANEW}"
            )
        setattr(table, name, value)
    return Loaded(table, source, str(machine), *_parse_device(record.get("device"), source))


def _parse_device(section: Any, source: Path) -> tuple[Thresholds, str]:
    """Reads the section on devices: {"name": of the GPU, "table": {...}} and what else was noted; or None.

    Returns:
        The table and the name; the default limits and "" of None.

    Raises:
        ValueError: It is not one.
    """
    if section is None:
        return DEFAULT, ""
    try:
        values, device = dict(section["table"]), section["name"]
    except (KeyError, TypeError, ValueError):
        device = None
    if not isinstance(device, str) or not device:
        raise ValueError(
            f"{source}: expected the section on devices to have a name, of the devices, and a table, got {section!r}. "
            "Write it anew with `python -m fastcoll.tune --device cuda`."
        )
    if wrong := sorted(set(values) ^ set(Thresholds.names())):
        raise ValueError(
            f"{source}: expected a table on devices of {', '.join(Thresholds.names())}; missing or unknown: "
            f"{', '.join(wrong)}. Write it anew with `python -m fastcoll.tune --device cuda`."
        )
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ValueError(
                f"{source}: expected {name} of devices to be a number, got {value!r}. {_ANEW}"
            )
    return Thresholds(**values), device


@functools.cache
def _load(choice: str, host: Path) -> Loaded:
    if choice not in ("auto", "default"):
        path = Path(choice)
        try:
            return parse(path.read_text(), path)
        except OSError as error:
            raise ValueError(
                f"FASTCOLL_TUNING={choice}: expected a file, `default` or `auto` ({error.strerror}). "
                "Correct or unset the variable."
            ) from None
    if choice == "auto":
        try:
            text = host.read_text()
        except OSError:  # not written, or another user's
            text = ""
        if text and (loaded := parse(text, host)).machine == machine_name():
            return loaded
    return parse(SHIPPED.read_text(), SHIPPED)


def load() -> Loaded:
    """Returns the table that groups of this process use unless their options name another.

    Raises:
        ValueError: FASTCOLL_TUNING or the file it names is wrong.
    """
    return _load(env.read()["FASTCOLL_TUNING"], host_path())
