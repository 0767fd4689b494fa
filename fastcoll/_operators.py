"""What torch's compiler must know of ``torch.ops.fastcoll``: shapes of results, and that calls stay in order.

csrc/bindings/operators.cpp has the operators. All ranks must call the collectives of a group in one order. So no call
may be removed because this rank does not use its result. Inductor may reorder independent calls by the memory that
they need, which differs between ranks with tensors of different sizes. It keeps the order of its own collectives, so
it gets these operators as such.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.library import register_fake as _register_fake

__all__ = ["FUNCTIONAL", "IN_PLACE", "keep_order"]

FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The operators that return a new tensor."""

IN_PLACE = ("all_reduce_", "all_gather_out", "reduce_scatter_out", "all_to_all_out")
"""The operators that write into a tensor of the caller, and return nothing."""

_OPERATORS = [getattr(torch.ops.fastcoll, name).default for name in (*FUNCTIONAL, *IN_PLACE)]

for _operator in _OPERATORS:
    has_side_effect(_operator)


def keep_order() -> None:
    """Lets Inductor keep the order of the operators; called again whenever it may have been imported."""
    if "torch._inductor.lowering" not in sys.modules:
        return
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings
    from torch.utils._pytree import tree_map

    def lowering(operator: Any) -> Callable[..., Any]:
        def lower(*arguments: Any, **out: Any) -> Any:
            made = ir._CollectiveKernel.create(operator, *arguments, **out)
            return tree_map(
                lambda one: ir.TensorBox.create(one) if isinstance(one, ir.IRNode) else one, made
            )

        return lower

    for operator in _OPERATORS:
        if operator not in lowerings:
            add_layout_constraint(operator, constrain_to_fx_strides)
            # Not by register_lowering, which takes no argument `out`.
            lowerings[operator] = lowering(operator)


# --- results without data ------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])


def register_fake(name: str) -> Callable[[_Function], _Function]:
    """As torch's, with a type."""
    return cast("Callable[[_Function], _Function]", _register_fake(f"fastcoll::{name}"))


_check: Any = torch._check
_check_value: Any = torch._check_value


def _result(tensor: Tensor, rows: Any) -> Tensor:
    keep_order()
    return tensor.new_empty((rows, *tensor.shape[1:]))


@register_fake("all_reduce")
def _all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    keep_order()
    return input.new_empty(input.shape)


@register_fake("all_gather")
def _all_gather(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return _result(input, (input.shape[0] if input.dim() else 1) * group_size)


@register_fake("reduce_scatter")
def _reduce_scatter(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    def problem() -> str:
        return (
            "torch.ops.fastcoll.reduce_scatter: expected an input whose first dimension is a multiple of "
            f"{group_size}, got {list(input.shape)}"
        )

    _check_value(input.dim() > 0, problem)
    _check_value(input.shape[0] % group_size == 0, problem)
    return _result(input, input.shape[0] // group_size)


@register_fake("all_to_all")
def _all_to_all(
    input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str
) -> Tensor:
    for rows in output_splits:
        _check(rows >= 0)
    return _result(input, sum(output_splits) if output_splits else input.shape[0])


def _nothing(*arguments: Any, **out: Tensor) -> None:
    keep_order()


for _name in IN_PLACE:
    register_fake(_name)(_nothing)
