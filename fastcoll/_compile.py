"""``fastcoll.compile``: ``torch.compile`` with collectives of fastcoll that are one call each.

A functional collective of torch is two nodes of the graph, ``_c10d_functional.all_reduce`` and ``wait_tensor``. It
runs on another thread, and torch keeps its work in a table until the wait. Where the wait follows at once, nothing is
gained by that. A pass of Inductor replaces such a pair by one operator of ``torch.ops.fastcoll``, which runs on the
calling thread. A collective stays as it is if the graph computes something before its wait, or if Inductor is set to
overlap collectives and the graph has something to overlap it with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.fx import Graph, Node

import fastcoll._load  # noqa: F401  # has the operators
from fastcoll._group_backend import serving_backend
from fastcoll._operators import resolve

__all__ = ["OneCallPass", "compile"]

_functional = torch.ops._c10d_functional
_operators = torch.ops.fastcoll

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

# Each collective of torch, its operator here, and which of its arguments the operator takes.
_CALLS: dict[Any, tuple[Any, tuple[int, ...]]] = {
    _functional.all_reduce.default: (_operators.all_reduce.default, (0, 1)),
    _functional.all_gather_into_tensor.default: (_operators.all_gather.default, (0,)),
    _functional.reduce_scatter_tensor.default: (_operators.reduce_scatter.default, (0, 1)),
    _functional.all_to_all_single.default: (_operators.all_to_all.default, (0, 1, 2)),
}

# Options of Inductor by which it overlaps collectives with computation.
_OVERLAPS = ("reorder_for_compute_comm_overlap", "_micro_pipeline_tp")
_BUCKETS = ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx")


def compile(  # as torch.compile
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """As ``torch.compile`` with Inductor; collectives of fastcoll's groups that are awaited at once are one call each.

    The results are the same bits. Groups of other backends are left alone, and collectives that overlap with
    computation are too. The pass goes before the passes that ``options`` name as ``post_grad_custom_post_pass``.

    Args:
        model: As for ``torch.compile``: a module or function; None: returns a decorator.
        mode: As for ``torch.compile``.
        options: As for ``torch.compile``; may be given with ``mode``.
        arguments: Other arguments of ``torch.compile``: ``fullgraph``, ``dynamic``, ``disable``.

    Raises:
        ValueError: ``backend`` is given and is not "inductor".
    """
    backend = arguments.pop("backend", "inductor")
    if backend != "inductor":
        raise ValueError(
            f'fastcoll.compile: expected backend "inductor", got {backend!r}. Other backends have no passes: call '
            "torch.compile, and torch.ops.fastcoll in the model."
        )
    chosen: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    chosen.update(options or {})
    given = chosen.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    chosen["post_grad_custom_post_pass"] = OneCallPass(given)
    return torch.compile(model, options=chosen, **arguments)


class OneCallPass(CustomGraphPass):
    """The pass, for users who call Inductor themselves: ``post_grad_custom_post_pass``.

    Args:
        then: A pass to call afterwards.
    """

    def __init__(self, then: Callable[[Graph], None] | None = None) -> None:
        self._then = then

    def __call__(self, graph: Graph) -> None:
        """Replaces collectives of the graph."""
        for node in list(graph.nodes):
            if node.target in _CALLS and (wait := _wait_of(node)) and _is_ours(node):
                _replace(node, wait)
        if self._then is not None:
            self._then(graph)

    def uuid(self) -> Any:
        """Identifies what the pass does to a graph: its code, and which groups fastcoll serves."""
        served = sorted(
            (name, device)
            for group, name in c10d._world.pg_names.items()
            for device in ("cpu", "cuda")
            if serving_backend(group, torch.device(device)) is not None
        )
        then = None
        if self._then is not None:
            then = self._then.uuid() if isinstance(self._then, CustomGraphPass) else None
            if then is None:
                return None  # torch's cache cannot know what it does
        return get_hash_for_files((__file__,), repr((served, then)))


# --- which collectives ---------------------------------------------------------------------------


def _wait_of(node: Node) -> Node | None:
    """Returns the collective's wait if the collective may as well end at its own place in the graph."""
    wait = next(iter(node.users), None)
    if wait is None or len(node.users) != 1 or wait.target != _functional.wait_tensor.default:
        return None
    between = node.next
    while between is not wait:
        if _computes(between):
            return None
        between = between.next
    return None if _inductor_overlaps() and _has_company(node) else wait


def _computes(node: Node) -> bool:
    """Whether a node does work that a collective could overlap with."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace in ("_c10d_functional", "fastcoll") or node.target.is_view:
        return False
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _inductor_overlaps() -> bool:
    passes = getattr(config, "aten_distributed_optimizations", None)
    if getattr(passes, "enable_overlap_scheduling", False):
        return True
    if any(getattr(config, name, False) for name in _OVERLAPS):
        return True
    return any(getattr(config, name, "none") != "none" for name in _BUCKETS)


def _has_company(node: Node) -> bool:
    """Whether the graph computes something that neither needs the collective nor is needed by it."""
    tied = {node}
    for step in ("all_input_nodes", "users"):
        queue = [node]
        while queue:
            for other in getattr(queue.pop(), step):
                if other not in tied:
                    tied.add(other)
                    queue.append(other)
    return any(_computes(other) for other in node.graph.nodes if other not in tied)


def _is_ours(node: Node) -> bool:
    group: Any = node.args[-1]
    tensor: Any = node.args[0]
    if isinstance(group, Node):
        return False
    if "reduce" in str(node.target) and str(node.args[1]).lower() not in _REDUCTIONS:
        return False
    if isinstance(group, str):
        group = resolve(group)
    return serving_backend(group, tensor.meta["val"].device) is not None


# --- replacement ---------------------------------------------------------------------------------


def _replace(node: Node, wait: Node) -> None:
    """Puts the operator at the collective's place."""
    operator, taken = _CALLS[node.target]
    group: Any = node.args[-1]
    name = group if isinstance(group, str) else group.group_name
    with node.graph.inserting_before(node):
        call = node.graph.call_function(operator, (*(node.args[i] for i in taken), name))
    call.meta.update(wait.meta)
    values = torch.fx.node.map_arg(call.args, lambda argument: argument.meta["val"])
    with V.fake_mode:
        call.meta["val"] = operator(*values)
    wait.replace_all_uses_with(call)
    node.graph.erase_node(wait)
    node.graph.erase_node(node)
