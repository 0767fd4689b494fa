"""``python -m fastcoll.bench.traffic``: the memory traffic that a path adds around the collectives of a training step.

A dispatch mode sees every operator of a step, and adds up what it reads and writes; operators are counted too, each of
which is a launch on a GPU. The same step without DistributedDataParallel is taken away. Nothing is timed, and the
collectives are not counted: they return at once. Where an operator runs does not change what it reads and writes, so
the CPU tells what a GPU would be asked for.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.immediate_group import immediate_group
from fastcoll.bench.machine import describe_run
from fastcoll.ddp import FusedAllreduceState, fused_allreduce_hook

__all__ = ["GRADIENT_PATHS", "Counted", "GradientPath", "Traffic", "count", "main"]

_MODULE = "fastcoll.bench.traffic"
_RANKS = 8
_VIEW = {"gradient_as_bucket_view": True}
_ONLY_WRITTEN = ("copy_", "_foreach_copy_", "fill_", "zero_")


class Traffic(TorchDispatchMode):
    """Counts the operators that touch memory, and their bytes.

    An argument is read, unless it is only written: ``out``, and the target of ``copy_`` and the like. A result is
    written, unless it is a view or empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if size := _bytes_of(func._schema, args, kwargs, result):
            self.launches += 1
            self.bytes += size
        return result


def _bytes_of(schema: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    name = schema.name.partition("::")[2]
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.returns]
    is_view = any(
        returned.alias_info is not None and not is_write
        for returned, is_write in zip(schema.returns, written, strict=True)
    )
    if is_view:
        return 0
    size = 0
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        target = argument.alias_info is not None and argument.alias_info.is_write
        reads = not name.endswith("_like") and not (
            target and (argument.is_out or name in _ONLY_WRITTEN)
        )
        size += (reads + target) * sum(map(_extent, _tensors(value)))
    if not any(written) and "empty" not in name:
        size += sum(map(_extent, _tensors(result)))
    return size


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _extent(tensor: Tensor) -> int:
    """Returns the bytes that a pass over a tensor touches; single numbers count as none."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) if tensor.dim() else 0


@dataclass(frozen=True)
class GradientPath:
    """A way to average gradients.

    Attributes:
        name: What a user would call it.
        ddp: Options of DistributedDataParallel.
        hook: Registers a communication hook, and returns its state.
        kept: Whether gradients are zeroed before the step, and not set to None.
        after: What follows the backward pass, of (model, state).
    """

    name: str
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[DistributedDataParallel], Any] | None = None
    kept: bool = False
    after: Callable[[nn.Module, Any], None] | None = None


def _fused(**options: Any) -> Callable[[DistributedDataParallel], FusedAllreduceState]:
    def register(ddp: DistributedDataParallel) -> FusedAllreduceState:
        state = FusedAllreduceState(**options)
        ddp.register_comm_hook(state, fused_allreduce_hook)
        return state

    return register


def _bf16_compress(ddp: DistributedDataParallel) -> None:
    # DDP refuses the hook itself on CPU, by its name, and looks at annotations.
    ddp.register_comm_hook(
        None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    )


def _unscale_and_clip(model: nn.Module, state: Any) -> None:
    """What mixed precision does between backward pass and optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clip(model: nn.Module, state: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _clip_by_state(model: nn.Module, state: FusedAllreduceState) -> None:
    state.clip_grad_norm_(model.parameters(), 1.0)


_BATCHED = (
    [
        GradientPath("stock DDP, batched_grad_copy", {"batched_grad_copy": True}),
        GradientPath("stock DDP, batched_grad_copy, bucket views", _VIEW | {"batched_grad_copy": True}),
    ]
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters
    else []
)  # fmt: skip

GRADIENT_PATHS = [
    GradientPath("stock DDP"),
    GradientPath("stock DDP, bucket views", _VIEW),
    GradientPath("stock DDP, bucket views, gradients kept", _VIEW, kept=True),
    *_BATCHED,
    GradientPath("bf16_compress_hook", {}, _bf16_compress),
    GradientPath("bf16_compress_hook, bucket views", _VIEW, _bf16_compress),
    GradientPath("fused hook", {}, _fused()),
    GradientPath("fused hook, bucket views", _VIEW, _fused()),
    GradientPath("fused hook, bucket views, gradients kept", _VIEW, _fused(), kept=True),
    GradientPath("fused hook, bf16 wire, bucket views", _VIEW, _fused(wire_dtype=torch.bfloat16)),
    GradientPath(
        "fused hook, bf16 wire, bucket views, gradients kept",
        _VIEW,
        _fused(wire_dtype=torch.bfloat16),
        kept=True,
    ),
    GradientPath(
        "fused hook, fp8 wire, bucket views", _VIEW, _fused(wire_dtype=torch.float8_e4m3fn)
    ),
    GradientPath("stock DDP, bucket views; clip_grad_norm_", _VIEW, after=_clip),
    GradientPath("stock DDP, bucket views; unscale and clip of AMP", _VIEW, after=_unscale_and_clip),
    GradientPath(
        "fused hook, bucket views; its clip_grad_norm_",
        _VIEW,
        _fused(gradient_norm=True),
        after=_clip_by_state,
    ),
]  # fmt: skip
"""What is counted. Bucket views: ``gradient_as_bucket_view=True``."""


@dataclass(frozen=True)
class Counted:
    """What a path adds to a step without DDP and without what follows.

    Attributes:
        name: Of the path.
        bytes: Read and written.
        launches: Operators.
        passes: The bytes over those of all gradients, S.
    """

    name: str
    bytes: int
    launches: int
    passes: float


def _step(model: nn.Module, wrapped: nn.Module, path: GradientPath, state: Any) -> Traffic:
    """Takes three steps, for DDP makes its buckets anew after the first, and counts the last."""
    for _ in range(3):
        model.zero_grad(set_to_none=not path.kept)
        loss = wrapped()
        with Traffic() as traffic:
            loss.backward()
            if path.after is not None and wrapped is not model:
                path.after(model, state)
    return traffic


def count(path: GradientPath, shapes: Sequence[tuple[int, ...]], ranks: int = _RANKS) -> Counted:
    """Counts one path, in this process alone.

    Args:
        path: What to count.
        shapes: Of the parameters, which are float32.
        ranks: Of the group that the path believes in.

    Raises:
        ValueError: There is a default process group.
    """
    elements = sum(map(math.prod, shapes))
    memory = torch.zeros(elements)
    with immediate_group(ranks):
        alone = EmulatedModel(shapes, memory, 1.0, 0.0)
        base = _step(alone, alone, path, None)
        del alone
        model = EmulatedModel(shapes, memory, 1.0, 0.0)
        ddp = DistributedDataParallel(model, **path.ddp)
        state = path.hook(ddp) if path.hook is not None else None
        found = _step(model, ddp, path, state)
        del ddp, model, state
        gc.collect()
    added = found.bytes - base.bytes
    return Counted(path.name, added, found.launches - base.launches, added / (4 * elements))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the record")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    shapes = MODELS[options.model]()
    size = 4 * sum(map(math.prod, shapes))
    print(
        f"{options.model}: P = {len(shapes)} tensors, S = {size} bytes of gradients; {_RANKS} ranks"
    )
    print(f"{'added to a step without DDP':<56}{'bytes/S':>9}{'launches':>10}")
    rows = []
    for path in GRADIENT_PATHS:
        row = count(path, shapes)
        print(f"{row.name:<56}{row.passes:>9.3f}{row.launches:>10}", flush=True)
        rows.append(asdict(row))
    if options.json:
        run = describe_run(given)
        record = {
            **{name: run[name] for name in ("date", "revision", "versions")},
            "command": " ".join(["python", "-m", _MODULE, *given]),
            "model": options.model,
            "tensors": len(shapes),
            "size": size,
            "ranks": _RANKS,
            "unit": "bytes and operators beyond a step without DDP; passes: bytes over size",
            "paths": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
