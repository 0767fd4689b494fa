"""What torch's compiler must know of ``torch.ops.fastcoll``: shapes of results, and that calls stay in order.

csrc/bindings/operators.cpp has the operators. All ranks must call the collectives of a group in one order. Inductor
may reorder independent calls by the memory that they need, which differs between ranks with tensors of different
sizes. It keeps the order of its own collectives, so it gets these operators as such.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.library import register_fake as _register_fake

__all__ = ["FUNCTIONAL", "IN_PLACE", "keep_order", "resolve"]

_operators = torch.ops.fastcoll

FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The operators that return a new tensor."""

IN_PLACE = ("all_reduce_", "all_gather_out", "reduce_scatter_out", "all_to_all_out")
"""The operators that write into a tensor of the caller, and return nothing."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def keep_order() -> None:
    """Lets Inductor keep the order of the operators; called again whenever it may have been imported."""
    if "torch._inductor.lowering" not in sys.modules:
        return
    from torch._inductor import ir
    from torch._inductor.lowering import (
        add_layout_constraint,
        constrain_to_fx_strides,
        lowerings,
        register_lowering,
    )

    def register(name: str, lower: Callable[..., Any]) -> None:
        operator = getattr(_operators, name).default
        if operator not in lowerings:
            add_layout_constraint(operator, constrain_to_fx_strides)
            register_lowering(operator, type_promotion_kind=None)(lower)

    def make(operator: Any) -> Callable[..., Any]:
        call: Any = ir._CollectiveKernel.create_out_of_place
        return lambda *arguments: ir.TensorBox.create(call(operator, *arguments))

    def make_in_place(operator: Any) -> Callable[..., None]:
        call = ir._CollectiveKernel.create_inplace
        return lambda *arguments, **out: call(operator, *arguments, **out)

    for name in FUNCTIONAL:
        register(name, make(getattr(_operators, name).default))
    for name in IN_PLACE:
        register(name, make_in_place(getattr(_operators, name).default))


# --- results without data ------------------------------------------------------------------------


def resolve(group_name: str) -> ProcessGroup:
    """Returns the group with a name."""
    find: Any = _resolve_process_group
    group: ProcessGroup = find(group_name)
    return group


def _ranks(group_name: str) -> int:
    return resolve(group_name).size()


def register_fake(name: str) -> Callable[[_Function], _Function]:
    """As torch's, with a type."""
    return cast("Callable[[_Function], _Function]", _register_fake(f"fastcoll::{name}"))


def _result(tensor: Tensor, rows: Any) -> Tensor:
    keep_order()
    return tensor.new_empty((rows, *tensor.shape[1:]))


@register_fake("all_reduce")
def _all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    keep_order()
    return input.new_empty(input.shape)


@register_fake("all_gather")
def _all_gather(input: Tensor, group_name: str) -> Tensor:
    return _result(input, (input.shape[0] if input.dim() else 1) * _ranks(group_name))


@register_fake("reduce_scatter")
def _reduce_scatter(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    ranks = _ranks(group_name)
    if input.dim() == 0 or input.shape[0] % ranks:
        raise ValueError(
            "torch.ops.fastcoll.reduce_scatter: expected an input whose first dimension is a multiple of "
            f"{ranks}, got {list(input.shape)}"
        )
    return _result(input, input.shape[0] // ranks)


@register_fake("all_to_all")
def _all_to_all(
    input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str
) -> Tensor:
    return _result(input, sum(output_splits) if output_splits else input.shape[0])


def _nothing(*arguments: Any, **out: Tensor) -> None:
    keep_order()


for _name in IN_PLACE:
    register_fake(_name)(_nothing)
