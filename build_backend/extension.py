"""Compiles the extension ``fastcoll._C`` with ninja.

The headers of torch and of the standard library take most of the time. Each of these two sets is compiled once, into a
precompiled header; torch's is only for the sources that include it. Sources that include nothing of torch are compiled
without a path to torch. ``make sanitize`` compiles the lower layers of docs/project/architecture.md the same way, so a
wrong include fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import toolchain
from setuptools import Extension
from setuptools.command.build_ext import build_ext

__all__ = ["BuildExtension", "Sources", "TorchExtension"]

ROOT = Path(__file__).resolve().parent.parent
TORCH_HEADERS = "csrc/torch_headers.hpp"
STANDARD_HEADERS = "csrc/standard_headers.hpp"

_INCLUDE = re.compile(
    r'^\s*#\s*include\s+(?:"([^"]+)"|<((?:ATen|c10|pybind11|torch)/[^>]+)>)', re.M
)


@dataclass
class Sources:
    """The sources below csrc/, sorted by the headers that they include directly or through csrc/.

    Attributes:
        plain: Include nothing of torch.
        light: Include only c10, whose headers are short.
        heavy: Include ATen, pybind11 or torch: compiled with the precompiled header.
    """

    plain: list[str] = field(default_factory=list)
    light: list[str] = field(default_factory=list)
    heavy: list[str] = field(default_factory=list)

    @classmethod
    def below(cls, root: Path) -> Sources:
        """Sorts the sources below ``root``/csrc; paths are relative to ``root``."""
        folder = root / "csrc"
        found: dict[Path, frozenset[str]] = {}

        def torch_of(path: Path) -> frozenset[str]:
            if path not in found:
                found[path] = frozenset()  # for headers that include each other
                torch: set[str] = set()
                for own, outer in _INCLUDE.findall(path.read_text()):
                    if outer:
                        torch.add(outer.split("/")[0])
                        continue
                    for place in (folder / own, path.parent / own):
                        if place.exists():
                            torch |= torch_of(place.resolve())
                            break
                found[path] = frozenset(torch)
            return found[path]

        sources = cls()
        for path in sorted(folder.rglob("*.cpp")):
            torch = torch_of(path.resolve())
            kind = (
                sources.plain if not torch else sources.light if torch == {"c10"} else sources.heavy
            )
            kind.append(str(path.relative_to(root)))
        return sources

    def all(self) -> list[str]:
        """Returns all sources."""
        return sorted(self.plain + self.light + self.heavy)


class TorchExtension(Extension):
    """An extension that is compiled against the torch of the running environment."""

    def __init__(self, name: str, macros: dict[str, str]):
        from torch.utils.cpp_extension import include_paths, library_paths

        self.torch_headers = include_paths()
        self.kinds = Sources.below(ROOT)
        super().__init__(
            name,
            sources=self.kinds.all(),
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
        (folder / "build.ninja").write_text(ninja_file(extension, folder, target))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        command = ["ninja", "-C", str(folder), "-j", jobs]
        subprocess.run([*command, *([] if self.verbose > 1 else ["--quiet"])], check=True)


def ninja_file(extension: TorchExtension, folder: Path, target: Path) -> str:
    """Returns the text of the ninja file that compiles into ``folder`` and links to ``target``."""
    macros = [f'-D{name}="{value}"' for name, value in extension.define_macros]
    python = [
        f"-I{path}" for path in dict.fromkeys(map(sysconfig.get_path, ("include", "platinclude")))
    ]
    # torch's headers are system headers, so they give no warnings.
    torch = [flag for path in extension.torch_headers for flag in ("-isystem", path)]
    # Without this, a new compiler or torch in the place of the old one would change no command.
    made_by = f"torch {metadata.version('torch')}, {toolchain.compiler_version()}"
    plain = [
        *["-std=c++20", "-O3", "-g1", "-DNDEBUG", "-fPIC", "-fwrapv", "-fvisibility=hidden"],
        *["-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{ROOT / 'csrc'}", *macros],
        f'-DFASTCOLL_MADE_BY="{made_by}"',
    ]
    light = [*plain, *torch]
    heavy = [
        *[*light, *python, "-DFMT_HEADER_ONLY=1", "-DTORCH_API_INCLUDE_EXTENSION_H"],
        f"-DTORCH_EXTENSION_NAME={extension.name.rsplit('.', 1)[-1]}",
    ]
    compiler = os.environ.get("CXX") or "c++"
    own = os.environ.get("CXXFLAGS", "")
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {compiler}",
        f"plain = {_joined(plain)} {own}",
        f"light = {_joined(light)} {own}",
        f"heavy = {_joined(heavy)} {own}",
        *_rule("compile", "$cxx -MMD -MF $out.d $flags -c $in -o $out", "CXX $in"),
        *_rule("precompile", "$cxx -MMD -MF $out.d $flags -x c++-header $in -o $out", "PCH $in"),
        "rule link",
        "  command = $cxx -shared $in -o $out $libraries",
        "  description = LINK $out",
    ]
    objects = []
    for flags, header, sources in (
        ("$heavy", TORCH_HEADERS, extension.kinds.heavy),
        ("$light", "", extension.kinds.light),
        ("$plain", STANDARD_HEADERS, extension.kinds.plain),
    ):
        needs = ""
        if header:
            precompiled = _path(f"{folder / header}.gch")
            lines += [
                f"build {precompiled}: precompile {_path(ROOT / header)}",
                f"  flags = {flags}",
            ]
            needs = f" | {precompiled}"
            flags += " -Winvalid-pch " + _joined(["-include", str(folder / header)])
        for source in sources:
            made = _path((folder / source).with_suffix(".o"))
            lines += [f"build {made}: compile {_path(ROOT / source)}{needs}", f"  flags = {flags}"]
            objects.append(made)
    libraries = [
        *[f"-L{path}" for path in extension.library_dirs],
        *[f"-l{name}" for name in extension.libraries],
    ]
    lines += [
        f"build {_path(target)}: link {' '.join(objects)}",
        f"  libraries = {os.environ.get('LDFLAGS', '')} {_joined([*libraries, *extension.extra_link_args])}",
        f"default {_path(target)}",
    ]
    return "\n".join(lines) + "\n"


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
