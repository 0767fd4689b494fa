"""Machine code for several GPUs at once: Triton's front end runs once for all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._launch import options_of, source_of


class _SharedSource(ASTSource):  # type: ignore[misc]
    """The source of a kernel, which is translated to Triton's intermediate language for the first target only.

    What comes out says nothing of the target, as no kernel here asks for it; all that follows is done for each.
    """

    _text = ""

    def make_ir(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the module in a context of the compiler, by Triton's contract the last argument."""
        if not self._text:
            module = super().make_ir(*arguments, **keywords)
            self._text = str(module)
            return module
        context = keywords.get("context", arguments[-1])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "module.ttir"
            path.write_text(self._text)
            module = ir.parse_mlir_module(str(path), context)
        module.context = context  # else it would be freed before the module
        return module


def compile_for_each(configuration: Configuration, architectures: Sequence[int]) -> list[Any]:
    """Compiles a configuration as ``fastcoll.kernels._launch.compile_for`` does, to the same bytes.

    Args:
        configuration: Of a kernel that is not interpreted.
        architectures: Compute capabilities, 90 for 9.0.

    Returns:
        Triton's ``CompiledKernel`` of each, not loaded.

    Raises:
        ValueError: Signature and constexprs are not the kernel's arguments, or these are out of order.
    """
    source = source_of(configuration, _SharedSource)
    options = options_of(configuration)
    return [
        triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        for architecture in architectures
    ]
