"""How a kernel is launched: Triton compiles it once, and C++ launches its machine code (csrc/cuda/kernel.hpp).

Nothing of Triton takes part in a launch, so no release's launch interface matters, and no C compiler is needed at run
time. Interpreted kernels take the same way: there C++ calls ``_interpret``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from fastcoll.kernels._configuration import Configuration, double_bits
from fastcoll.kernels.peers import PeerBuffers

if TYPE_CHECKING:
    from fastcoll._load_cuda import CUDA

__all__ = [
    "Launch",
    "arithmetic",
    "compile_for",
    "is_interpreted",
    "kernel_on",
    "options_of",
    "pack",
    "prepared",
    "require_device",
    "require_parameters",
    "source_of",
]

Launch: TypeAlias = "CUDA.Launch"
"""A launch on a device: calling it launches on the device's current stream."""

_WIDTHS = {"i32": "32", "i64": "64"}
_SCRATCH = ["64", "64"]  # two pointers that Triton appends: global and profile scratch memory
_NOT_LAUNCHED = (
    *("global_scratch_size", "profile_scratch_size"),
    *("launch_cooperative_grid", "launch_pdl"),
)


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
        "num_stages": 1,  # no software pipelining
        **configuration.options,
    }


def compile_for(configuration: Configuration, target: Any) -> Any:
    """Compiles a configuration for a ``GPUTarget`` of Triton, and returns Triton's ``CompiledKernel``, not loaded yet.

    The kernel is not interpreted, and no GPU is needed. Triton's own cache on disk is used.

    Raises:
        ValueError: Signature and constexprs are not the kernel's arguments, or are out of order.
    """
    source = source_of(configuration)
    return triton.compile(source, target=target, options=options_of(configuration))


def require_parameters(configuration: Configuration, compiled: Any) -> None:
    """Checks that C++ can launch what Triton has compiled: arguments of these widths, two pointers, nothing else.

    Raises:
        RuntimeError: This release of Triton compiles other parameters.
    """
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    found = re.findall(r"\.param\s+\.[a-z]+(\d+)", entry.group(1) if entry else "")
    expected = [_WIDTHS[kind] for kind in configuration.signature.values()] + _SCRATCH
    needs = [name for name in _NOT_LAUNCHED if getattr(compiled.metadata, name, 0)]
    if found != expected or needs:
        raise RuntimeError(
            f"{configuration.name}: expected machine code that takes parameters of {', '.join(expected)} bits, got "
            f"{', '.join(found)}{' and ' * bool(needs)}{', '.join(needs)}. Install a release of Triton that "
            f"fastcoll supports instead of {triton.__version__}."
        )


def prepared(
    configuration: Configuration,
    device: torch.device,
    programs: int,
    arguments: Sequence[int],
    held: object = None,
    **places: Any,
) -> Launch:
    """Returns a launch on a device.

    Args:
        configuration: The configuration to launch.
        device: CUDA with an index, or the CPU for interpreted kernels.
        programs: Number of programs; 0 launches nothing.
        arguments: The kernel's arguments that are no constexprs, in order.
        held: Objects that must live as long: memory that arguments refer to.
        places: What a plan replaces for each call; see ``CUDA.Launch``.

    Raises:
        ValueError: The kernel cannot run on that device.
        RuntimeError: The machine code cannot be launched or loaded.
    """
    from fastcoll._load_cuda import CUDA

    if len(arguments) != len(configuration.signature):
        raise ValueError(
            f"{configuration.name}: expected {len(configuration.signature)} arguments, got {len(arguments)}."
        )
    return CUDA.Launch(kernel_on(configuration, device), programs, arguments, held, **places)


def arithmetic(op: str, scale: float, peers: PeerBuffers) -> tuple[int, int]:
    """Returns the bits of the factor, and the divisor, for kernels between ranks."""
    return double_bits(scale), peers.world_size if op == "avg" else 1


def pack(
    configuration: Configuration,
    peers: PeerBuffers,
    programs: int,
    tensors: tuple[torch.Tensor, torch.Tensor],
    arguments: tuple[int, ...],
    **places: Any,
) -> Launch:
    """Returns the launch of one rank, for kernels between ranks.

    Args:
        configuration: The configuration.
        peers: The ranks' buffers.
        programs: Channels; 0 to launch nothing.
        tensors: This rank's source and out.
        arguments: The kernel's arguments after the number of channels.
        places: As for ``prepared``.

    Raises:
        RuntimeError: The buffers are closed.
    """
    peers.require_open()
    source, out = tensors
    return prepared(
        configuration,
        peers.device,
        programs,
        (
            *(source.data_ptr(), out.data_ptr(), peers.table.data_ptr()),
            *(peers.rank, peers.world_size, programs, *arguments),
        ),
        peers,
        source_at=0,
        out_at=1,
        **places,
    )


def kernel_on(configuration: Configuration, device: torch.device) -> CUDA.Kernel:
    """Returns the only kernel of a configuration on a device, compiled and loaded at the first call.

    Raises:
        ValueError: The kernel cannot run on that device.
        RuntimeError: The machine code cannot be launched or loaded.
    """
    key = (id(configuration), device)
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                # With its configuration, so ids stay unique.
                found = _kernels[key] = (configuration, _loaded(configuration, device))
    return found[1]


_kernels: dict[tuple[int, torch.device], tuple[Configuration, CUDA.Kernel]] = {}
_lock = threading.Lock()


def _loaded(configuration: Configuration, device: torch.device) -> CUDA.Kernel:
    # Not at the top: kernels can be compiled, and so tested, without fastcoll's compiled module.
    from fastcoll._load_cuda import CUDA

    interpreted = is_interpreted(configuration.kernel)
    require_device(device, interpreted)
    if interpreted:
        return CUDA.Kernel.interpreted(
            lambda programs, arguments: _interpret(configuration, programs, arguments)
        )
    major, minor = torch.cuda.get_device_capability(device)
    compiled = compile_for(configuration, GPUTarget("cuda", 10 * major + minor, 32))
    require_parameters(configuration, compiled)
    return CUDA.Kernel(
        device,
        configuration.name,
        compiled.asm["cubin"],
        compiled.metadata.name,
        32 * compiled.metadata.num_warps,
        compiled.metadata.shared,
    )


def _interpret(configuration: Configuration, programs: int, arguments: tuple[int, ...]) -> None:
    configuration.kernel[(programs,)](*arguments, **configuration.constexprs)
