"""``python -m fastcoll.bench.clipped_step``: a real training step of GPT-2 with clipped gradients, by DDP and without.

The model has GPT-2's shapes (124 M parameters, Radford et al., 2019) and random weights. Forward and backward run
under bfloat16 autocast. One rank trains on one GPU, so nothing is sent: the step shows what surrounds a collective.
Each way trains the same model from the same weights, and takes turns with the others:

- ``ddp``: DistributedDataParallel on fastcoll, ``clip_grad_norm_``, AdamW
- ``nccl``: the same on torch's nccl
- ``synchronizer``: GradientSynchronizer, whose pass computes the norm; ``clip_in_step`` scales within AdamW's step

The table has the time of a step, its launches and their time by torch.profiler, the peak of allocated memory, and the
loss after the same steps. Losses of the ways differ by rounding only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from fastcoll._measure import in_turns, summarise, synchronize, take_turn
from fastcoll.bench.conditions import command_line, describe_run
from fastcoll.bench.options import script_parser
from fastcoll.bench.record import write_record
from fastcoll.bench.step_profile import profile_step
from fastcoll.bench.table import Column, Table
from fastcoll.ddp import GradientSynchronizer

__all__ = ["Gpt2", "main"]

_MAX_NORM = 1.0
_VOCABULARY, _POSITIONS = 50257, 1024
_CLOSE = 0.01  # relative difference of losses that bfloat16 explains
_TABLE = Table(
    *(Column("way", -14), Column("step(ms)", 10, 2), Column("q1", 8, 2), Column("q3", 8, 2)),
    *(Column("launches", 9, 0), Column("on device(us)", 14, 0), Column("peak(MiB)", 10, 0)),
    Column("loss", 9, 4),
)


class Gpt2(nn.Module):
    """GPT-2 of some width: returns the loss of predicting each next token.

    Args:
        layers: Number of blocks.
        width: Of the residual stream; a head has 64 of it.
    """

    def __init__(self, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(_POSITIONS, width)
        block = partial(nn.TransformerEncoderLayer, width, width // 64, 4 * width, 0.0, F.gelu)
        self.blocks = nn.ModuleList(block(batch_first=True, norm_first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean loss of tokens [batch, length], a scalar."""
        length = tokens.shape[1] - 1
        places = torch.arange(length, device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        carry = self.tokens(tokens[:, :-1]) + self.positions(places)
        for block in self.blocks:
            carry = block(carry, src_mask=mask, is_causal=True)
        logits = F.linear(self.norm(carry), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class _Way:
    """A way to train: its model, its optimizer, and a step."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(1)
        model = Gpt2(options.layers, options.width).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(_VOCABULARY, (options.batch, options.length + 1)).to(device)
        self._type = device.type
        group = dist.new_group(backend="nccl" if name == "nccl" else "fastcoll")
        self._model: nn.Module = model
        self._synchronizer: GradientSynchronizer | None = None
        if name == "synchronizer":
            self._synchronizer = GradientSynchronizer(model, group, gradient_norm=True)
        else:
            self._model = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )

    def step(self) -> Tensor:
        """Takes a step, and returns its loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self._type, torch.bfloat16):
            loss: Tensor = self._model(self._tokens)
        torch.autograd.backward(loss)
        if self._synchronizer is None:
            nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_NORM)
        else:
            self._synchronizer.clip_in_step(self.optimizer, _MAX_NORM)
        self.optimizer.step()
        return loss


def _peak(step: Callable[[], object], device: torch.device) -> float | None:
    """Returns the most memory that a step had allocated at once, in MiB; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) / 2**20


def _measured(
    ways: Mapping[str, _Way], options: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    def together() -> None:
        synchronize(device)

    for way in ways.values():
        for _ in range(3):  # compiles kernels, rebuilds DDP's buckets
            way.step()
    losses = {name: float(way.step()) for name, way in ways.items()}
    turns = {
        name: partial(take_turn, way.step, device, together, 1, options.steps)
        for name, way in ways.items()
    }
    times = in_turns(turns, options.rounds)
    for name, way in ways.items():
        yield {
            "way": name,
            "time": asdict(summarise(times[name])),
            "profile": profile_step(way.step, device, together)._asdict(),
            "peak_mebibytes": _peak(way.step, device),
            "loss": losses[name],
        }


def _row(case: Mapping[str, Any]) -> str:
    milliseconds = [case["time"][key] / 1e3 for key in ("median", "lower", "upper")]
    work = case["profile"]
    launches = work["launches"] + work["collectives"]
    spent = work["launch_microseconds"] + work["collective_microseconds"]
    more = [launches, spent, case["peak_mebibytes"], case["loss"]]
    return _TABLE.row([case["way"], *milliseconds, *more])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures.

    Returns:
        The exit status: 0, 1 if the losses of two ways differ, 2 if there is no GPU.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = script_parser("clipped_step").parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("fastcoll.bench.clipped_step: torch finds no CUDA device", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    names = ("ddp", "nccl", "synchronizer") if device.type == "cuda" else ("ddp", "synchronizer")
    cases = list(_measured({name: _Way(name, options, device) for name in names}, options, device))
    dist.destroy_process_group()
    print(*_TABLE.head(), *map(_row, cases), sep="\n")
    if options.json:
        record = describe_run(command_line("fastcoll.bench.clipped_step", given), device)
        write_record(options.json, {**record, "unit": "microseconds", "cases": cases})
    losses = [case["loss"] for case in cases]
    right = max(losses) - min(losses) <= _CLOSE * min(losses)
    print("# losses agree" if right else f"# losses differ: {losses} FAILED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
