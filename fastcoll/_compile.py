"""``fastcoll.compile``: ``torch.compile`` with collectives of fastcoll that are one call each.

A functional collective of torch is two nodes of the graph, ``_c10d_functional.all_reduce`` and ``wait_tensor``. It
runs on another thread, and torch keeps its work in a table until the wait. Where the wait follows at once, nothing is
gained by that. A pass of Inductor replaces such a pair by one operator of ``torch.ops.fastcoll``, which runs on the
calling thread. A collective stays as it is if the graph computes something before its wait, or if Inductor is set to
overlap collectives and the graph has something to overlap it with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload
from torch.distributed import ProcessGroup
from torch.fx import Graph, Node

import fastcoll._load  # noqa: F401  # has the operators
from fastcoll._group_backend import serving_backend
from fastcoll._version import __version__

__all__ = ["OneCallPass", "compile"]

_functional = torch.ops._c10d_functional
_operators = torch.ops.fastcoll

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

# Each collective of torch, and its operator here, which has the same arguments.
_CALLS: dict[Any, Any] = {
    _functional.all_reduce.default: _operators.all_reduce.default,
    _functional.all_gather_into_tensor.default: _operators.all_gather.default,
    _functional.reduce_scatter_tensor.default: _operators.reduce_scatter.default,
    _functional.all_to_all_single.default: _operators.all_to_all.default,
}

# Options of Inductor by which it overlaps collectives with computation.
_OVERLAPS = ("reorder_for_compute_comm_overlap", "_micro_pipeline_tp")
_BUCKETS = ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx")

_POST_PASS = "post_grad_custom_post_pass"


def compile(  # as torch.compile
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """As ``torch.compile`` with Inductor; collectives of fastcoll's groups that are awaited at once are one call each.

    The results are the same bits. Groups of other backends are left alone, and collectives that overlap with
    computation are too. Inductor's ``reorder_for_locality`` is off unless ``options`` sets it, because it moves
    collectives. Own passes (``post_grad_custom_post_pass``) run after this one.

    Args:
        model: As for ``torch.compile``: a module or function; None: returns a decorator.
        mode: As for ``torch.compile``, except "lite", which has no passes.
        options: As for ``torch.compile``; may be given with ``mode``.
        arguments: Other arguments of ``torch.compile``: ``fullgraph``, ``dynamic``, ``disable``.

    Raises:
        ValueError: ``backend`` is given and is not "inductor", or the mode has no passes.
    """
    backend = arguments.pop("backend", "inductor")
    if backend != "inductor":
        raise ValueError(
            f'fastcoll.compile: expected backend "inductor", got {backend!r}. Other backends have no passes: call '
            "torch.compile, and torch.ops.fastcoll in a model that does not train."
        )
    chosen: dict[str, Any] = {"reorder_for_locality": False}
    chosen |= torch._inductor.list_mode_options(mode) if mode else {}
    chosen |= {name.replace("-", "_"): value for name, value in (options or {}).items()}
    if not chosen.get("use_post_grad_passes", True):
        raise ValueError(
            f"fastcoll.compile: expected a mode with passes, got {mode!r}. Call torch.compile."
        )
    chosen[_POST_PASS] = _before(chosen.get(_POST_PASS, getattr(config, _POST_PASS)))
    return torch.compile(model, options=chosen, **arguments)


def _before(given: Any) -> Any:
    """Returns the pass, with the user's after it."""
    if given is None:
        return OneCallPass()
    if isinstance(given, (list, tuple)):
        return [OneCallPass(), *given]
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return [OneCallPass(), given]
    return OneCallPass(given)  # torch before 2.13 takes no lists


class OneCallPass(CustomGraphPass):
    """The pass, for users who call Inductor themselves: ``post_grad_custom_post_pass``.

    Args:
        then: A pass to call afterwards.
    """

    def __init__(self, then: Callable[[Graph], None] | None = None) -> None:
        self._then = then

    def __eq__(self, other: object) -> bool:
        """Equal passes share compiled code."""
        return type(other) is type(self) and other._then == self._then

    def __hash__(self) -> int:
        return hash((type(self), self._then))

    def __call__(self, graph: Graph) -> None:
        """Replaces collectives of the graph."""
        for node in list(graph.nodes):
            if node.target in _CALLS and (wait := _wait_of(node)) and (group := _group_of(node)):
                _replace(node, wait, group)
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
        files = [
            str(Path(__file__).with_name(name))
            for name in ("_compile.py", "_operators.py", "_group_backend.py")
        ]
        return get_hash_for_files(tuple(files), repr((__version__, served, then)))


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
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return True
    if node.op != "call_function" or not isinstance(target, OpOverload) or target.is_view:
        return False
    if target.namespace in ("_c10d_functional", "fastcoll"):
        return False
    return target._schema.is_mutable or isinstance(
        node.meta.get("val"), (torch.Tensor, tuple, list)
    )


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


def _group_of(node: Node) -> ProcessGroup | None:
    """Returns the group of a collective that fastcoll serves and has an operator for."""
    if node.kwargs or not isinstance(node.args[0], Node):
        return None
    if "reduce" in str(node.target) and str(node.args[1]).lower() not in _REDUCTIONS:
        return None
    value, group = node.args[0].meta.get("val"), _known_group(node.args[-1])
    if group is None or not isinstance(value, torch.Tensor):
        return None
    return group if serving_backend(group, value.device) is not None else None


def _known_group(name: Any) -> ProcessGroup | None:
    """Returns the group that a graph has by name or as an object; None: unknown before the graph runs."""
    if isinstance(name, ProcessGroup):
        return name
    by_name: dict[Any, ProcessGroup] = {each: group for group, each in c10d._world.pg_names.items()}
    return by_name.get(name) if isinstance(name, str) else None


# --- replacement ---------------------------------------------------------------------------------


def _replace(node: Node, wait: Node, group: ProcessGroup) -> None:
    """Puts the operator at the collective's place."""
    operator = _CALLS[node.target]
    with node.graph.inserting_before(node):
        call = node.graph.call_function(operator, (*node.args[:-1], group.group_name))
    # Those of the wait's argument are wrong for the operator.
    of_wait = ("eager_input_vals", "tensor_meta")
    call.meta |= {name: value for name, value in wait.meta.items() if name not in of_wait}
    values = torch.fx.node.map_arg(call.args, lambda argument: argument.meta["val"])
    with V.fake_mode:
        call.meta["val"] = operator(*values)
    wait.replace_all_uses_with(call)
    node.graph.erase_node(wait)
    node.graph.erase_node(node)
