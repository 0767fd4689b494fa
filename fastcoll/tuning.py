"""The tuning table of this host: the message sizes at which collectives change their algorithm.

``fastcoll tune`` measures a table and writes it where ``load`` finds it. ``load`` uses that file only on the
machine that the table names, because machines may share a home folder. A file that FASTCOLL_TUNING names is used on
any machine. All ranks of a group must use the same table; the rendezvous rejects others.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastcoll import env
from fastcoll._checks import first_match
from fastcoll._load import C
from fastcoll.cuda.thresholds import DEFAULT, Thresholds

__all__ = [
    *("FIELDS", "SHIPPED", "Loaded"),
    *("as_table", "host_path", "load", "machine_name", "parse", "values_of"),
]

FIELDS = tuple(name for name in dir(C.Tuning) if name.endswith("_bytes"))
_ANEW = "Write the table anew with `fastcoll tune`."
_MOST = 1 << 62


@dataclass(frozen=True)
class Loaded:
    """A table and its origin.

    Attributes:
        table: As ``fastcoll.Options(tuning=...)`` takes it.
        source: The file, or "shipped".
        machine: Machine on which it was measured.
        device: The section on all-reduces of device tensors; ``DEFAULT`` if the table has none.
        device_name: Name of the devices on which the section was measured; "" if the table has none.
    """

    table: C.Tuning
    source: str
    machine: str
    device: Thresholds = DEFAULT
    device_name: str = ""

    def thresholds_on(self, name: str) -> Thresholds:
        """Returns the section if it was measured on devices of that name, else ``DEFAULT``: no kernel is used."""
        return self.device if name == self.device_name else DEFAULT


def machine_name() -> str:
    """Returns the properties of this machine that a table depends on: processor, cores and caches."""
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
    cpu = first_match(r"^model name\s*:(.*)$", "/proc/cpuinfo")
    cpu = platform.machine() if cpu is None else cpu
    return f"{cpu}, {os.cpu_count()} cores, {', '.join(caches) or 'caches unknown'}"


def host_path() -> Path:
    """Returns the path of this host's table, by the XDG base directory specification."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "fastcoll" / "tuning.json"


def values_of(table: C.Tuning) -> dict[str, int]:
    """Returns the fields of a table."""
    return {name: getattr(table, name) for name in FIELDS}


SHIPPED: dict[str, Any] = {
    "machine": "2 cores of an AMD Zen 4 in a virtual machine, 1 MiB of second-level cache each, 32 MiB of "
    "third-level cache; 2 ranks",
    "table": values_of(C.Tuning()),
}
"""The table of csrc/cpu/algorithms/tuning.def, as a file would have it."""


def as_table(values: Mapping[str, int]) -> C.Tuning:
    """Returns the values of fields as ``fastcoll.Options(tuning=...)`` takes them."""
    table = C.Tuning()
    for name, value in values.items():
        setattr(table, name, value)
    return table


def parse(text: str, source: Path) -> Loaded:
    """Reads a table.

    Raises:
        ValueError: The text is no table; the message names the file and the error.
    """
    try:
        record: Any = json.loads(text)
        machine, values, section = record["machine"], record["table"], record.get("device")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{source}: expected a tuning table as `fastcoll tune` writes it, "
            f"got what cannot be read as one ({type(error).__name__}: {error}). {_ANEW}"
        ) from None
    checked = _check(values, FIELDS, f"{source}: expected a tuning table")
    loaded = Loaded(as_table(checked), str(source), str(machine))
    if section is None:
        return loaded
    what = f"{source}: expected the section on devices to have"
    device = section.get("name") if isinstance(section, dict) else None
    if not isinstance(device, str) or not device:
        raise ValueError(f"{what} a name, of the devices, and a table, got {section!r}. {_ANEW}")
    limits = _check(section.get("table"), asdict(DEFAULT), f"{what} a table")
    return replace(loaded, device=Thresholds(**limits), device_name=device)


def _check(values: Any, fields: Collection[str], expected: str) -> dict[str, int]:
    """Returns the values of these fields, if all are there, no others, and all are numbers.

    Raises:
        ValueError: They are not; the message begins with ``expected``.
    """
    names = values if isinstance(values, dict) else {}
    if wrong := sorted(set(names) ^ set(fields)):
        listed = ", ".join(wrong)
        raise ValueError(
            f"{expected} of {', '.join(fields)}; missing or unknown: {listed}. {_ANEW}"
        )
    for name, value in names.items():
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ValueError(
                f"{expected} in which {name} is a number from 0 to 2^62, got {value!r}. {_ANEW}"
            )
    return dict(names)


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
    return Loaded(C.Tuning(), "shipped", SHIPPED["machine"])


def load() -> Loaded:
    """Returns the table that groups of this process use unless their options have another.

    Raises:
        ValueError: FASTCOLL_TUNING or the file that is used is wrong.
    """
    return _load(env.read()["FASTCOLL_TUNING"], host_path())
