"""Compiles the extensions with ninja: ``fastcoll._C``, and ``fastcoll._cuda``, which moves device tensors.

A torch without CUDA has no such tensors, so ``_cuda`` is built there only with USE_CUDA=1, which tests ask for. It
uses functions of ``_C``, by whose soname the loader finds them: import ``_C`` first.

A user's build joins the sources of a folder to one unit, because each unit parses the headers again, which takes most
of the time. ``UNITY=0`` compiles them one by one, for developers: a change then compiles one file. There the
headers of torch, and those of the standard library, are compiled once, into a precompiled header.

Sources that may not include torch are compiled without a path to it. ``make sanitize`` compiles the lower layers of
docs/project/architecture.md the same way, so a wrong include fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import toolchain
from setuptools import Extension
from setuptools.command.build_ext import build_ext

__all__ = ["BuildExtension", "TorchExtension", "Unit", "joined", "units", "with_cuda"]

ROOT = Path(__file__).resolve().parent.parent

JOINED = {
    "bindings": (True, ("csrc/bindings/*",)),
    "torch": (True, ("csrc/*", "csrc/calls/*", "csrc/network/*", "csrc/torch/*")),
    "cuda": (True, ("csrc/cuda/*", "csrc/cuda/bindings/*")),
    "cpu": (False, ("csrc/cpu/*", "csrc/cpu/algorithms/*")),
    "hosts": (False, ("csrc/cpu/hosts/*",)),
    "point_to_point": (False, ("csrc/cpu/point_to_point/*",)),
    "lower": (False, ("csrc/base/*", "csrc/group/*", "csrc/shm/*", "csrc/trace/*")),
}
"""The sources that are joined to a unit, and whether they may include torch, whose headers take 6 s or more to parse.

The others, of csrc/reduce, are compiled one by one: each sets an instruction set for all that follows.
"""

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

    @property
    def module(self) -> str:
        """The extension that it belongs to."""
        return "_cuda" if self.sources[0].startswith("csrc/cuda/") else "_C"


def joined() -> bool:
    """Returns whether the sources of a folder are joined: unless UNITY is 0."""
    return os.environ.get("UNITY", "1") != "0"


def with_cuda() -> bool:
    """Returns whether ``_cuda`` is built: as USE_CUDA says, or else if this torch has CUDA."""
    import torch

    words = {"1": True, "ON": True, "TRUE": True, "YES": True}
    words |= {"0": False, "OFF": False, "FALSE": False, "NO": False}
    asked = os.environ.get("USE_CUDA", "")
    if asked and asked.upper() not in words:
        raise SystemExit(
            f"expected USE_CUDA to be one of {', '.join(words)}, got {asked!r}. Correct it."
        )
    return words[asked.upper()] if asked else torch.version.cuda is not None


def units(root: Path, join: bool) -> list[Unit]:
    """Returns the units of the sources below ``root``/csrc."""
    made = []
    rest = {path.relative_to(root) for path in (root / "csrc").rglob("*.cpp")}
    for name, (torch, patterns) in JOINED.items():
        found = sorted(rest & {one.relative_to(root) for p in patterns for one in root.glob(p)})
        rest -= set(found)
        if join and found:
            made.append(Unit(f"csrc/{name}", tuple(map(str, found)), torch))
        elif not join:
            made += [
                Unit(str(one.with_suffix("")), (str(one),), torch, HEADERS[torch]) for one in found
            ]
    header = "" if join else HEADERS[False]
    return made + [
        Unit(str(one.with_suffix("")), (str(one),), False, header) for one in sorted(rest)
    ]


class TorchExtension(Extension):
    """An extension that is compiled against the torch of the running environment.

    Attributes:
        module: ``_C`` or ``_cuda``.
    """

    def __init__(self, module: str, macros: dict[str, str]):
        from torch.utils.cpp_extension import include_paths, library_paths

        self.module = module
        self.torch_headers = include_paths()
        own = [unit for unit in units(ROOT, join=False) if unit.module == module]
        super().__init__(
            f"fastcoll.{module}",
            sources=[source for unit in own for source in unit.sources],
            define_macros=list(macros.items()),
            library_dirs=library_paths(),
            libraries=["c10", "torch", "torch_cpu", "torch_python"],
            language="c++",
        )


class BuildExtension(build_ext):
    """Writes a ninja file and runs it; unchanged sources are not compiled again."""

    def build_extensions(self) -> None:
        """Compiles and links the extensions.

        Raises:
            subprocess.CalledProcessError: A file does not compile.
        """
        folder = Path(self.build_temp).resolve()
        targets = [Path(self.get_ext_fullpath(one.name)).resolve() for one in self.extensions]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        lines = ninja_file(dict(zip(targets, self.extensions, strict=True)), folder)
        write(folder / "build.ninja", "".join(f"{line}\n" for line in lines))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        command = ["ninja", "-C", str(folder), "-j", jobs]
        subprocess.run([*command, *([] if self.verbose else ["--quiet"])], check=True)


def ninja_file(targets: Mapping[Path, TorchExtension], folder: Path) -> Iterator[str]:
    """Yields the lines of the ninja file that compiles into ``folder`` and links the targets, ``_C`` first."""
    extension = next(iter(targets.values()))
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
    yield from _rule(
        "precompile", "$cxx -MMD -MF $out.d $flags -x c++-header $in -o $out", "PCH $in"
    )
    yield "rule link"
    yield "  command = $cxx -shared $in -o $out $libraries"
    yield "  description = LINK $out"
    objects: dict[str, list[str]] = {one.module: [] for one in targets.values()}
    precompiled = set()
    for unit in units(ROOT, joined()):
        if unit.module not in objects:
            continue
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
        objects[unit.module].append(made)
    core = _path(next(iter(targets)))
    for target, one in targets.items():
        libraries = [
            *[f"-L{path}" for path in one.library_dirs],
            *[f"-l{name}" for name in one.libraries],
            *[f"-Wl,-soname,{one.name}", "-Wl,-Bsymbolic-functions", *one.extra_link_args],
        ]
        needed = objects[one.module] + [core] * (one.module != "_C")
        yield f"build {_path(target)}: link {' '.join(needed)}"
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
