"""What Flatten, Unflatten and Reduce share: choice of the configuration, and launches prepared once."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastcoll.buckets import BucketLayout
from fastcoll.kernels._configuration import Configuration
from fastcoll.kernels._dtypes import ELEMENT, accumulate_dtype, dtype_name
from fastcoll.kernels._launch import launcher
from fastcoll.kernels._prepared import PreparedLaunch
from fastcoll.kernels._statistics import Statistics

__all__ = [
    "DEFAULT_BLOCKING",
    "Blocking",
    "Plan",
    "configuration_of",
    "constexprs",
    "scale_arguments",
    "signature_of",
]


@dataclass(frozen=True)
class Blocking:
    """How much a program does.

    Attributes:
        block: Elements of a program; a multiple of `narrow`.
        warps: Of a program.
    """

    block: int
    warps: int

    @property
    def narrow(self) -> int:
        """Elements of a step through a block that is not whole or not aligned: four for each thread."""
        return 4 * 32 * self.warps


# Not tuned on a GPU yet: 16 elements for each thread are four 128-bit loads of float32 in flight and leave
# room for six programs on a multiprocessor (40 registers a thread).
DEFAULT_BLOCKING = Blocking(block=4096, warps=8)


def signature_of(kernel: Any) -> dict[str, str]:
    """Returns the signature of a kernel whose arguments are 64-bit integers, then constexprs."""
    return {name: "i64" for name in kernel.arg_names if not name.isupper()}


def constexprs(
    blocking: Blocking, input_dtype: torch.dtype, output_dtype: torch.dtype
) -> dict[str, object]:
    """Returns the constexprs that all kernels on blocks begin with."""
    return {
        "INPUT": ELEMENT[input_dtype],
        "OUTPUT": ELEMENT[output_dtype],
        "ACCUMULATE": tl.float64 if accumulate_dtype(input_dtype) == torch.float64 else tl.float32,
        "BLOCK": blocking.block,
        "NARROW": blocking.narrow,
    }


def configuration_of(
    table: Mapping[tuple[object, ...], Configuration], key: tuple[object, ...], kernel: str
) -> Configuration:
    """Returns the table's configuration for a key of dtypes (and an op).

    Raises:
        TypeError: There is none; the message lists what there is.
    """
    if key not in table:
        texts = [" -> ".join(_text(part) for part in known) for known in table]
        raise TypeError(
            f"fastcoll.kernels.{kernel}: expected one of {'; '.join(texts)}, got "
            f"{' -> '.join(_text(part) for part in key)}. Convert the tensors, or use another wire dtype."
        )
    return table[key]


def _text(part: object) -> str:
    return dtype_name(part) if isinstance(part, torch.dtype) else str(part)


@lru_cache(maxsize=256)
def _float_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def scale_arguments(
    scale: float | Tensor, accumulate: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """Returns the bits of the factor on the host and the address of the one on the device, or 0.

    Raises:
        TypeError: A tensor of another dtype than the accumulate dtype.
        ValueError: A tensor of more than one element, or on another device.
    """
    if not isinstance(scale, Tensor):
        return _float_bits(float(scale)), 0
    if scale.dtype != accumulate:
        raise TypeError(
            f"scale: expected a {dtype_name(accumulate)} tensor, got {dtype_name(scale.dtype)}. "
            f"Pass scale.to(torch.{dtype_name(accumulate)}), or a Python float."
        )
    if scale.numel() != 1 or scale.device != device:
        raise ValueError(
            f"scale: expected one element on {device}, got {scale.numel()} on {scale.device}. "
            "Move it there, or pass a Python float."
        )
    return _float_bits(1.0), scale.data_ptr()


class Plan:
    """Base of the plans: the layout's tables, the launcher, and what all launches have in common."""

    def __init__(
        self,
        layout: BucketLayout,
        configuration: Configuration,
        accumulate: torch.dtype,
        device: torch.device | str,
        blocking: Blocking,
    ) -> None:
        device = torch.device(device)
        if device == torch.device("cuda"):  # without an index
            device = torch.device("cuda", torch.cuda.current_device())
        self.layout = layout
        self.device = device
        self._launcher = launcher(configuration, device)
        self._accumulate = accumulate
        self._grid = layout.blocks(blocking.block)
        self._tables = (
            layout.block_map(blocking.block, device).data_ptr(),
            layout.device_sizes(device).data_ptr(),
        )

    @property
    def programs(self) -> int:
        """Programs of a launch."""
        return self._grid

    @property
    def configuration(self) -> Configuration:
        """What is launched."""
        return self._launcher.configuration

    def _scale(self, scale: float | Tensor) -> tuple[int, int]:
        return scale_arguments(scale, self._accumulate, self.device)

    def _statistics(self, statistics: Statistics | None) -> int:
        if statistics is None:
            return 0
        if statistics.programs < self._grid or statistics.device != self.device:
            raise ValueError(
                f"statistics: expected room for {self._grid} programs on {self.device}, got room for "
                f"{statistics.programs} on {statistics.device}. Use Statistics(plan.programs, plan.device)."
            )
        return statistics.address

    def _prepared(
        self,
        arguments: tuple[int, ...],
        statistics: Statistics | None,
        *tables: object,
        place: int = 0,
    ) -> PreparedLaunch:
        """Returns the launch; `place`: which of the arguments is the table of the tensors' addresses."""
        clear = statistics.clear if statistics is not None else None
        held = (self.layout, statistics, *tables)
        every = (*self._tables, *arguments)
        place += len(self._tables)
        return PreparedLaunch(self._launcher, self._grid, every, held, clear, place)
