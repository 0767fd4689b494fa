"""``python -m fastcoll.bench.traffic``: the memory traffic that a path adds around the collectives of a training step.

A dispatch mode sees every operator of a step, and adds up what it reads and writes; operators are counted too, each of
which is a launch on a GPU. The same step without DistributedDataParallel is taken away. Nothing is timed, and the
collectives are not counted: they return at once. Where an operator runs does not change what it reads and writes, so
the CPU tells what a GPU would be asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastcoll.bench.attachments import Attached
from fastcoll.bench.gradients import MODELS, EmulatedModel
from fastcoll.bench.immediate_group import immediate_group
from fastcoll.bench.machine import describe_run
from fastcoll.bench.traffic_paths import GRADIENT_PATHS, GradientPath

__all__ = ["Counted", "Traffic", "count", "main"]

_MODULE = "fastcoll.bench.traffic"
_RANKS = 8
_ONLY_WRITTEN = ("copy_", "_foreach_copy_", "fill_", "zero_")


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that touch memory, and their bytes.

    An argument is read, unless it is only written: ``out``, and the target of ``copy_`` and the like. A result is
    written, unless it is a view or empty.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
    """Returns the bytes that a pass over a tensor touches, once each; tensors without dimensions count as none."""
    if not tensor.dim():
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(length for length, stride in sizes if stride)


@dataclass(frozen=True)
class Counted:
    """What a path adds to a step without DDP and without what follows.

    Attributes:
        name: Of the path.
        why: Where the bytes come from.
        bytes: Read and written.
        launches: Operators.
        passes: The bytes over those of all gradients, S.
    """

    name: str
    why: str
    bytes: int
    launches: int
    passes: float


def _step(model: nn.Module, attached: Attached, kept: bool) -> Traffic:
    """Takes three steps, for DDP makes its buckets anew after the first, and counts the last."""
    for _ in range(3):
        model.zero_grad(set_to_none=not kept)
        loss = attached.module()
        traffic = Traffic()
        with traffic:
            loss.backward()
            attached.after()
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
    with immediate_group(ranks, path.fusing):
        alone = EmulatedModel(shapes, memory, 1.0, 0.0)
        base = _step(alone, Attached(alone), path.kept)
        del alone
        model = EmulatedModel(shapes, memory, 1.0, 0.0)
        attached = path.attach(model)
        found = _step(model, attached, path.kept)
        del attached, model
        gc.collect()
    added = found.bytes - base.bytes
    return Counted(
        path.name, path.why, added, found.launches - base.launches, added / (4 * elements)
    )


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
    print(f"{'added to a step without DDP':<64}{'bytes/S':>9}{'launches':>10}")
    rows = []
    for path in GRADIENT_PATHS:
        row = count(path, shapes)
        print(f"{row.name:<64}{row.passes:>9.3f}{row.launches:>10}", flush=True)
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
