"""A CUDA driver that records launches, for processes that compile kernels and have no GPU.

``python -m fake_cuda`` compares what Triton's own launcher gives the driver with what fastcoll's gives it; see
``described``. It needs Triton, gcc and Python.h, and not fastcoll's compiled module.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NUMBERS = {"i32": (4, 7), "i64": (8, (1 << 40) + 3)}
STREAM = 0x5EED


class Driver:
    """The driver, in a library that has the name by which one is found, and is in ``folder``."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        library = self.folder / "libcuda.so.1"
        source = Path(__file__).with_suffix(".c")
        flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *flags, "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_cuda_log.restype = ctypes.c_char_p

    def reset(self, configuration: Any = None) -> None:
        """Empties the record; launches are of this configuration from now on."""
        kinds = [] if configuration is None else configuration.signature.values()
        widths = [_NUMBERS[kind][0] for kind in kinds] + [8, 8]
        self._library.fake_cuda_reset((ctypes.c_int * len(widths))(*widths), len(widths))

    def fail(self, function: str, status: int) -> None:
        """Lets a function fail."""
        self._library.fake_cuda_fail(function.encode(), status)

    def allow_threads(self, most: int) -> None:
        """Sets how many threads of a block a function may have."""
        self._library.fake_cuda_threads(most)

    def log(self) -> list[str]:
        """Returns what was recorded."""
        return self._library.fake_cuda_log().decode().splitlines()


def arguments_of(configuration: Any) -> list[int]:
    """Returns other numbers for each argument."""
    return [
        _NUMBERS[kind][1] + 5 * index for index, kind in enumerate(configuration.signature.values())
    ]


def described(
    configuration: Any, compiled: Any, programs: int, stream: int, context: int
) -> list[str]:
    """Returns the launch that the driver must record: arguments in order, then two null pointers, and nothing else."""
    widths = [_NUMBERS[kind][0] for kind in configuration.signature.values()]
    numbers = zip(arguments_of(configuration), widths, strict=True)
    values = [number.to_bytes(width, "little").hex() for number, width in numbers]
    return [
        f"{compiled.metadata.name} grid {programs} 1 1 block {32 * configuration.num_warps} 1 1 shared "
        f"{compiled.metadata.shared} stream {stream:#x} attributes 0 context {context:#x} parameters "
        + " ".join([*values, "00" * 8, "00" * 8])
    ]


def first_of_each(modules: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yields a configuration of each name, and its machine code for Hopper."""
    from triton.backends.compiler import GPUTarget

    from fastcoll.kernels._launch import compile_for, require_parameters

    first: dict[Any, Any] = {}
    for name in modules:
        for configuration in importlib.import_module(f"fastcoll.kernels.{name}").configurations():
            first.setdefault(configuration.name.split()[0], configuration)
    for configuration in first.values():
        compiled = compile_for(configuration, GPUTarget("cuda", 90, 32))
        require_parameters(configuration, compiled)
        yield configuration, compiled


def main() -> int:
    """Launches a kernel of each kind by Triton's launcher.

    Returns:
        The exit status: 1 if one is given to the driver in another way than fastcoll's launcher gives it.
    """
    driver = Driver()
    os.environ["TRITON_LIBCUDA_PATH"] = str(driver.folder)
    from kernel_table import KERNEL_MODULES
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver as drivers

    drivers.set_active(CudaDriver())
    drivers.active.get_current_device = lambda: 0
    drivers.active.get_device_capability = lambda _device=0: (9, 0)
    wrong = 0
    for configuration, compiled in first_of_each(KERNEL_MODULES):
        driver.reset(configuration)
        given = [*arguments_of(configuration), *configuration.constexprs.values()]
        run, *made = compiled.run, compiled.function, compiled.packed_metadata  # run makes them
        run(5, 1, 1, STREAM, *made, None, None, None, *given)
        expected = described(configuration, compiled, 5, STREAM, 100)
        print(
            configuration.name,
            "OK" if driver.log() == expected else f"FAILED: {driver.log()}, not {expected}",
        )
        wrong += driver.log() != expected
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
