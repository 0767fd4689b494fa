"""Other ways than torch's to make a call of a case: by fastcoll's communicator, and by torch.ops.fastcoll."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastcoll

COMMUNICATOR = {
    f"{name}_{suffix}": name
    for name in ("all_gather", "reduce_scatter", "all_to_all", "gather")
    for suffix in ("single", "tensor", "into_tensor")
}
"""The communicator's names of calls for one tensor."""

OPERATORS = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""The operators of torch.ops.fastcoll, by the names of cases."""

ROOTED = ["reduce", "broadcast", "gather", "scatter", "gather_single"]


def call_direct(runner: Any, collective: Callable, *arguments: Any, **options: Any) -> None:
    """Make the call by fastcoll's communicator, whose ranks are those of the group; as a plan twice."""
    name = COMMUNICATOR.get(collective.__name__, collective.__name__)
    if name in ROOTED:
        arguments = (*arguments[:-1], runner.at)
    if name == "gather":  # torch names the input first
        arguments = (arguments[1], arguments[0], *arguments[2:])
    comm = fastcoll.communicator(runner.group)
    if runner.case.door == "direct":
        return getattr(comm, name)(*arguments, **options)
    plan = getattr(comm, f"{name}_plan")(*arguments, **options)
    kept = [(output, output.clone()) for output in runner.outputs]
    plan()
    for output, content in kept:
        output.copy_(content)
    plan()


def call_operator(
    runner: Any, collective: Callable, output: Tensor, *given: Any, **options: Any
) -> None:
    """Make the call by an operator: by one that returns a tensor, or that writes into a tensor."""
    name = OPERATORS[runner.case.collective]
    call, group = getattr(torch.ops.fastcoll, name), runner.group.group_name
    op = [runner.case.op.lower()] if options else []
    if name == "all_reduce":
        given = (output,)
    if name == "all_to_all" and len(given) == 1:
        given = (*given, [], [])
    if runner.case.seed % 2:
        size = [runner.size] if name in ("all_gather", "reduce_scatter") else []
        output.copy_(call(*given, *op, *size, group).view(output.shape))
    elif name == "all_reduce":
        torch.ops.fastcoll.all_reduce_(output, *op, group)
    else:
        getattr(torch.ops.fastcoll, f"{name}_out")(*given, *op, group, out=output)
