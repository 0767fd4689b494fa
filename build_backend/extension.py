"""Compiles the extension ``fastcoll._C`` with ninja.

A user's build joins the sources of a folder to one unit, because each unit parses the headers again, which takes most
of the time. ``FASTCOLL_UNITY=0`` compiles them one by one, for developers: a change then compiles one file. There the
headers of torch, and those of the standard library, are compiled once, into a precompiled header.

Sources outside of ``TORCH`` are compiled without a path to torch. ``make sanitize`` compiles the lower layers of
docs/project/architecture.md the same way, so a wrong include fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import toolchain
from setuptools import Extension
from setuptools.command.build_ext import build_ext

__all__ = ["BuildExtension", "TorchExtension", "Unit", "joined", "one_by_one", "units"]

ROOT = Path(__file__).resolve().parent.parent

TORCH = ("csrc", "csrc/bindings", "csrc/calls", "csrc/cuda", "csrc/network", "csrc/torch")
"""The folders whose sources may include torch."""

ALONE = ("csrc/reduce",)
"""The folders whose sources are never joined: each sets an instruction set for all that follows in its unit."""

SEVERAL = {"csrc/bindings": 2}
"""The folders that are joined to more than one unit, which are compiled at the same time."""

HEADERS = {True: "csrc/torch_headers.hpp", False: "csrc/standard_headers.hpp"}
"""What is precompiled for sources that are compiled one by one: with torch, and without."""


@dataclass(frozen=True)
class Unit:
    """What one run of the compiler compiles.

    Attributes:
        name: Path of the object below the build folder, without its suffix.
        sources: Paths relative to the root; several are joined by a file that includes them.
        torch: Whether they may include torch.
        header: The precompiled header, or "".
    """

    name: str
    sources: tuple[str, ...]
    torch: bool
    header: str = ""


def joined() -> bool:
    """Returns whether the sources of a folder are joined: unless FASTCOLL_UNITY is 0."""
    return os.environ.get("FASTCOLL_UNITY", "1") != "0"


def units(root: Path, join: bool) -> list[Unit]:
    """Returns the units of the sources below ``root``/csrc, those that take longest first."""
    folders: dict[str, list[str]] = {}
    for path in sorted((root / "csrc").rglob("*.cpp")):
        source = path.relative_to(root)
        folders.setdefault(str(source.parent), []).append(str(source))
    made = []
    for folder, sources in folders.items():
        torch = folder in TORCH
        if not join or folder in ALONE:
            header = "" if join else HEADERS[torch]
            made += [Unit(one.removesuffix(".cpp"), (one,), torch, header) for one in sources]
            continue
        count = SEVERAL.get(folder, 1)
        for part in range(count):
            name = f"{folder}/joined{part if count > 1 else ''}"
            made.append(Unit(name, tuple(sources[part::count]), torch))
    return sorted(made, key=lambda unit: not unit.torch)


class TorchExtension(Extension):
    """An extension that is compiled against the torch of the running environment."""

    def __init__(self, name: str, macros: dict[str, str]):
        from torch.utils.cpp_extension import include_paths, library_paths

        self.torch_headers = include_paths()
        super().__init__(
            name,
            sources=[source for unit in units(ROOT, join=False) for source in unit.sources],
            define_macros=list(macros.items()),
            library_dirs=library_paths(),
            libraries=["c10", "torch", "torch_cpu", "torch_python"],
            language="c++",
        )


class BuildExtension(build_ext):
    """Writes a ninja file and runs it; unchanged sources are not compiled again."""

    def build_extension(self, extension: Extension) -> None:
        """Compiles and links one extension.

        Raises:
            subprocess.CalledProcessError: A file does not compile.
        """
        assert isinstance(extension, TorchExtension)
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        write(folder / "build.ninja", "".join(f"{x}\n" for x in ninja_file(extension, folder, target)))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        command = ["ninja", "-C", str(folder), "-j", jobs]
        subprocess.run([*command, *([] if self.verbose > 1 else ["--quiet"])], check=True)


def ninja_file(extension: TorchExtension, folder: Path, target: Path) -> Iterator[str]:
    """Yields the lines of the ninja file that compiles into ``folder`` and links to ``target``."""
    python = [
        f"-I{path}" for path in dict.fromkeys(map(sysconfig.get_path, ("include", "platinclude")))
    ]
    plain = [
        *["-std=c++20", "-O2", "-g0", "-DNDEBUG", "-fPIC", "-fwrapv", "-fvisibility=hidden"],
        *["-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{ROOT / 'csrc'}"],
    ]
    torch = [
        *plain,
        # torch's headers are system headers, so they give no warnings.
        *[flag for path in extension.torch_headers for flag in ("-isystem", path)],
        *[*python, "-DFMT_HEADER_ONLY=1", "-DTORCH_API_INCLUDE_EXTENSION_H"],
        f"-DTORCH_EXTENSION_NAME={extension.name.rsplit('.', 1)[-1]}",
        *[f'-D{name}="{value}"' for name, value in extension.define_macros],
    ]
    own = os.environ.get("CXXFLAGS", "")
    # Another compiler or torch in the place of the old one changes no command, so each is written to a file on which
    # the objects depend.
    write(folder / "compiler", toolchain.compiler_version())
    write(folder / "torch", metadata.version("torch"))
    yield "ninja_required_version = 1.5"
    yield f"cxx = {os.environ.get('CXX') or 'c++'}"
    yield f"plain = {_joined(plain)} {own}"
    yield f"torch = {_joined(torch)} {own}"
    yield from _rule("compile", "$cxx -MMD -MF $out.d $flags -c $in -o $out", "CXX $name")
    yield from _rule("precompile", "$cxx -MMD -MF $out.d $flags -x c++-header $in -o $out", "PCH $in")
    yield "rule link"
    yield "  command = $cxx -shared $in -o $out $libraries"
    yield "  description = LINK $out"
    objects, precompiled = [], set()
    for unit in units(ROOT, joined()):
        flags = "$torch" if unit.torch else "$plain"
        needs = " | compiler" + (" torch" if unit.torch else "")
        if unit.header:
            header = _path(f"{folder / unit.header}.gch")
            if header not in precompiled:
                precompiled.add(header)
                yield f"build {header}: precompile {_path(ROOT / unit.header)}{needs}"
                yield f"  flags = {flags}"
            needs += f" {header}"
            flags += " -Winvalid-pch " + _joined(["-include", str(folder / unit.header)])
        source = ROOT / unit.sources[0]
        if len(unit.sources) > 1:
            source = folder / f"{unit.name}.cpp"
            write(source, "".join(f'#include "{ROOT / one}"\n' for one in unit.sources))
        made = _path(folder / f"{unit.name}.o")
        yield f"build {made}: compile {_path(source)}{needs}"
        yield f"  flags = {flags}"
        yield f"  name = {unit.name}"
        objects.append(made)
    libraries = [
        *[f"-L{path}" for path in extension.library_dirs],
        *[f"-l{name}" for name in extension.libraries],
        *extension.extra_link_args,
    ]
    yield f"build {_path(target)}: link {' '.join(objects)}"
    yield f"  libraries = {os.environ.get('LDFLAGS', '')} {_joined(libraries)}"
    yield f"default {_path(target)}"


def write(path: Path, text: str) -> None:
    """Writes a file, unless it has this text: so it gets no new time."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _rule(name: str, command: str, description: str) -> list[str]:
    return [
        f"rule {name}",
        f"  command = {command}",
        f"  description = {description}",
        "  depfile = $out.d",
        "  deps = gcc",
    ]


def _joined(flags: list[str]) -> str:
    return " ".join("'" + flag.replace("$", "$$").replace("'", "'\\''") + "'" for flag in flags)


def _path(path: str | Path) -> str:
    """Escapes a path for a build statement."""
    return re.sub(r"([$ :])", r"$\1", str(path))
