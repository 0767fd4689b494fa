"""How a kernel is launched: machine code compiled once, arguments packed once, a few microseconds a call.

``kernel[grid](...)`` inspects every argument of every call to choose a specialisation, which takes 5 us of
host time before the driver's. Here the configuration is chosen beforehand, compiled by the same call as in
the compile gate, and passed straight to ``CompiledKernel.run``. That method is not documented. So it is
used only with releases of Triton whose source was checked for its arguments. Other releases use
``kernel[grid](...)``, and ``fallback_reason`` gives the reason.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction

from fastcoll.kernels._configuration import Configuration

__all__ = [
    "CHECKED_RELEASES",
    "Launcher",
    "compile_for",
    "current_stream",
    "fallback_reason",
    "is_interpreted",
    "launcher",
    "options_of",
    "require_device",
    "source_of",
]

CHECKED_RELEASES = ("3.6", "3.7", "3.8", "3.9")
"""Releases of Triton whose ``CompiledKernel.run`` takes (grid x, y, z, stream, function, packed metadata,
launch metadata, enter hook, exit hook, all arguments of the kernel in order)."""


def is_interpreted(kernel: Any) -> bool:
    """Returns whether TRITON_INTERPRET=1 was set when the kernel was decorated."""
    return isinstance(kernel, InterpretedFunction)


def require_device(device: torch.device, interpreted: bool) -> None:
    """Checks that kernels can run on tensors of that device.

    Raises:
        ValueError: They cannot; the error gives the remedy.
    """
    if interpreted and device.type != "cpu":
        raise ValueError(
            f"expected CPU tensors, got {device}: TRITON_INTERPRET=1 was set when fastcoll.kernels was "
            "imported, and interpreted kernels cannot reach a GPU's memory. Unset it."
        )
    if not interpreted and device.type != "cuda":
        raise ValueError(
            f"expected CUDA tensors, got {device}. Move the tensors to a GPU; for a test without one set "
            "TRITON_INTERPRET=1 before fastcoll.kernels is imported."
        )


def current_stream(device: torch.device) -> int:
    """Returns the handle of the device's current CUDA stream; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))


@lru_cache(maxsize=1)
def fallback_reason() -> str:
    """Returns why launches go through ``kernel[grid](...)``, or "" if they take the fast path."""
    release = ".".join(triton.__version__.split(".")[:2])
    if release not in CHECKED_RELEASES:
        return (
            f"the launch arguments of Triton {triton.__version__} have not been checked, only those of "
            f"{', '.join(CHECKED_RELEASES)}: launches take some microseconds longer"
        )
    names = list(inspect.signature(CudaLauncher.__call__).parameters)
    if names[1:6] != ["gridX", "gridY", "gridZ", "stream", "function"]:
        return (
            f"Triton {triton.__version__} has been changed: its launcher takes {names[1:]}: launches take some "
            "microseconds longer"
        )
    return ""


def source_of(configuration: Configuration, kind: type[ASTSource] = ASTSource) -> ASTSource:
    """Returns the source that Triton compiles for a configuration.

    Args:
        configuration: A configuration of a kernel that is not interpreted.
        kind: Class of the source.

    Raises:
        ValueError: Signature and constexprs are not the kernel's arguments, or are out of order.
    """
    names = list(configuration.kernel.arg_names)
    given = [*configuration.signature, *configuration.constexprs]
    if given != names:
        raise ValueError(
            f"{configuration.name}: expected the arguments {names}, got {given}: first the signature's, then "
            "the constexprs, both in order. Correct the configuration."
        )
    signature = {name: configuration.signature.get(name, "constexpr") for name in names}
    return kind(
        configuration.kernel,
        signature,
        dict(configuration.constexprs),
        configuration.attributes(),
    )


def options_of(configuration: Configuration) -> dict[str, object]:
    """Returns the compiler options, by name."""
    return {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        **configuration.options,
    }


def compile_for(configuration: Configuration, target: Any) -> Any:
    """Compiles a configuration; Triton's own cache on disk is used.

    Args:
        configuration: A configuration of a kernel that is not interpreted.
        target: Triton's ``GPUTarget``; no GPU is needed.

    Returns:
        Triton's ``CompiledKernel``, not loaded yet.

    Raises:
        ValueError: Signature and constexprs are not the kernel's arguments, or are out of order.
    """
    source = source_of(configuration)
    return triton.compile(source, target=target, options=options_of(configuration))


class Launcher:
    """Launches one configuration on one device. Compiles and loads in its constructor, never later.

    Args:
        configuration: The configuration to launch.
        device: CUDA with an index, or the CPU for interpreted kernels.

    Attributes:
        configuration: As given.
        device: As given.
        is_fast: Whether launches skip Triton's own argument handling.

    Raises:
        ValueError: The kernel cannot run on that device.
    """

    def __init__(self, configuration: Configuration, device: torch.device) -> None:
        interpreted = is_interpreted(configuration.kernel)
        require_device(device, interpreted)
        self.configuration = configuration
        self.device = device
        self.is_fast = not interpreted and not fallback_reason()
        self._constants = tuple(configuration.constexprs.values())
        if self.is_fast:
            self._load()

    def _load(self) -> None:
        with torch.cuda.device(self.device):
            compiled = compile_for(self.configuration, driver.active.get_current_target())
            self._run: Callable[..., None] = compiled.run  # the property loads the code
            self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._compiled = compiled  # owns the loaded code
        self._index = self.device.index

    def pack(
        self, stream: int, grid: int, arguments: tuple[Any, ...], place: int = 0
    ) -> Callable[..., None]:
        """Returns a function that launches `grid` programs with these arguments, on the stream with this handle.

        The stream must be current when the function is called, because Triton's slow path always uses the current
        stream. Arguments of that call replace the packed ones from `place` on. All pointers are addresses.
        """
        if not self.is_fast:
            return partial(self._call_slowly, grid, arguments, place)
        every = arguments + self._constants
        # Grid, stream, code; then metadata and hooks for profilers, all None here.
        head = (grid, 1, 1, stream, self._function, self._metadata, None, None, None)
        packed = head + every
        index, run = self._index, self._run
        current_device = torch._C._cuda_getDevice
        begin = len(head) + place

        def launch(*given: Any) -> None:
            called = packed
            if given:
                called = packed[:begin] + given + packed[begin + len(given) :]
            enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                self._call_with_hooks(stream, grid, called[len(head) :])
            elif current_device() == index:
                run(*called)
            else:
                with torch.cuda.device(index):
                    run(*called)

        return launch

    def _call_with_hooks(self, stream: int, grid: int, every: tuple[Any, ...]) -> None:
        enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
        with torch.cuda.device(self._index):
            metadata = self._compiled.launch_metadata((grid, 1, 1), stream, *every)
            self._run(
                *(grid, 1, 1, stream, self._function, self._metadata),
                *(metadata, enter, leave, *every),
            )

    def _call_slowly(self, grid: int, arguments: tuple[Any, ...], place: int, *given: Any) -> None:
        arguments = arguments[:place] + given + arguments[place + len(given) :]
        configuration = self.configuration
        options: dict[str, object] = {}
        if not is_interpreted(configuration.kernel):
            options = options_of(configuration)
        launch = configuration.kernel[(grid,)]
        if self.device.type != "cuda":
            launch(*arguments, **configuration.constexprs, **options)
            return
        with torch.cuda.device(self.device):
            launch(*arguments, **configuration.constexprs, **options)


_HOOKS = triton.knobs.runtime
_launchers: dict[tuple[int, torch.device], Launcher] = {}
_lock = threading.Lock()


def launcher(configuration: Configuration, device: torch.device) -> Launcher:
    """Returns the only launcher of a configuration on a device, made at the first call.

    Raises:
        ValueError: The kernel cannot run on that device.
    """
    key = (id(configuration), device)
    found = _launchers.get(key)  # a launcher holds its configuration, so ids stay unique
    if found is None:
        with _lock:
            found = _launchers.get(key)
            if found is None:
                found = _launchers[key] = Launcher(configuration, device)
    return found
