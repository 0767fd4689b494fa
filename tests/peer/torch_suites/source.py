"""PyTorch's test files, from Debian's source package `pytorch`, unpacked into build/.

apt fetches and verifies the package with lists of its own below build/: the system's sources,
lists and packages stay as they are. Of the releases that Debian has, the one nearest to the torch
in use is taken.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from torch_suites import cpu_text

__all__ = ["SOURCE", "fetch"]

BUILD = Path(__file__).parents[3] / "build" / "torch_suites"
SOURCE = "pytorch"
_DEBIAN_SUITES = ("unstable", "testing", "stable", "oldstable")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_WANTED = re.compile(r"[^/]+/test/(distributed/.*|inductor/[^/]+\.py|[^/]+\.py)")


class SourceError(RuntimeError):
    """Debian's source package cannot be had."""


def _apt(*arguments: str) -> list[str]:
    apt = BUILD / "apt"
    options = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
    }
    tool, *rest = arguments
    return [tool, *(f"-o{name}={value}" for name, value in options.items()), *rest]


def _say(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourceError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _mirror() -> str:
    """Returns the address of the Debian mirror that this system uses."""
    try:
        told = _say(["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"])
    except FileNotFoundError:
        raise SourceError(
            "expected apt-get, found none: unpack PyTorch's source yourself and name its folder "
            "with --source"
        ) from None
    mirrors = sorted({line.split()[1] for line in told.splitlines() if line.startswith("Debian ")})
    plain = [mirror for mirror in mirrors if "security" not in mirror]
    if not plain:
        raise SourceError(
            "expected a Debian mirror in apt's sources, found none: run apt-get update on Debian, "
            "or unpack PyTorch's source yourself and name its folder with --source"
        )
    return plain[0]


def _versions() -> list[str]:
    apt = BUILD / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    option = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    mirror = _mirror()
    lines = [f"deb-src {option}{mirror} {suite} main\n" for suite in _DEBIAN_SUITES]
    (apt / "sources.list").write_text("".join(lines))
    _say(_apt("apt-get", "update"))
    told = _say(_apt("apt-cache", "showsrc", SOURCE))
    return re.findall(r"^Version: (\S+)$", told, re.MULTILINE)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.match(r"\d*", minor)[0] or 0)


def _nearest_first(versions: list[str], torch_version: str) -> list[str]:
    major, minor = _release(torch_version)

    def distance(version: str) -> tuple[int, int]:
        its_major, its_minor = _release(version)
        return abs(its_major - major), abs(its_minor - minor)

    return sorted(set(versions), key=distance)


def _download(versions: list[str]) -> tuple[str, Path]:
    refusals = []
    for version in versions:
        folder = BUILD / "archives" / version
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _say(
                _apt("apt-get", "source", "--download-only", f"{SOURCE}={version}"),
                folder.resolve(),
            )
        except SourceError as error:
            refusals.append(f"{version}: {error}")
            print(f"Debian's {SOURCE} {version} cannot be fetched: trying the next one", flush=True)
            shutil.rmtree(folder)
            continue
        return version, next(folder.glob("*.orig.tar.*"))
    raise SourceError("no version of Debian's source package came: " + "; ".join(refusals))


def _unpack(archive: Path, folder: Path) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and _WANTED.fullmatch(member.name):
                member.name = member.name.split("/", 1)[1]
                tar.extract(member, part, filter="data")
    part.rename(folder)


def fetch(torch_version: str, source: str | None = None) -> tuple[str, Path]:
    """Returns the version of the test files and the folder `test` with them, made for CPU.

    Args:
        torch_version: release of the torch in use, such as "2.13.0".
        source: folder of a PyTorch source tree to take the files from; by default Debian's package.
    """
    if source is not None:
        version, original = f"folder {Path(source).name}", Path(source) / "test"
    else:
        known = sorted((BUILD / "archives").glob("*/*.orig.tar.*"))
        if known:
            nearest = _nearest_first([path.parent.name for path in known], torch_version)
            version = nearest[0]
            archive = next(path for path in known if path.parent.name == version)
        else:
            version, archive = _download(_nearest_first(_versions(), torch_version))
        unpacked = BUILD / "original" / version.split("+")[0].split("-")[0]
        if not unpacked.exists():
            _unpack(archive, unpacked)
        original = unpacked / "test"
    return version, _made_for_cpu(original)


def _made_for_cpu(original: Path) -> Path:
    of_what = hashlib.sha256(Path(cpu_text.__file__).read_bytes() + bytes(original.resolve()))
    made = BUILD / "made" / of_what.hexdigest()[:12]
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        shutil.copytree(original, part / "test")
        cpu_text.convert(part / "test" / "distributed")
        part.rename(made)
    return made / "test"
