"""Generates text token by token with a transformer that is split over the ranks by DTensor's tensor parallelism.

    torchrun --nproc-per-node 2 examples/tensor_parallel_generate.py

First all ranks train the same model until it knows a text by heart. Then they generate the text, each with its share
of the heads and of the hidden units. Each layer makes two all-reduces of one token. ``fastcoll.compile`` turns each
into one call. An argument is the number of layers, 4 otherwise.

Expected output, with other times. These are of one run on an idle machine with 2 cores:

    gloo, eager                     61 tokens/s
    fastcoll, eager                 97 tokens/s
    gloo, torch.compile            104 tokens/s
    fastcoll, torch.compile        431 tokens/s
    fastcoll, fastcoll.compile    1089 tokens/s
    Reduces the tensor data across all machines in a way that all get the final result.
    After the call ``tensor`` is going to be bit
"""

import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fastcoll

WIDTH, HEADS, LAYERS, CONTEXT = 256, 8, 4, 128
PROMPT = b"Reduces "

SPLIT: dict[str, ParallelStyle] = {
    name: ColwiseParallel() for name in ("query", "key", "value", "up")
} | {name: RowwiseParallel() for name in ("out", "down")}


class Layer(nn.Module):
    """Attention and a perceptron. ``shards``: how many ranks share the heads that ``keys`` and ``values`` cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.norm_in, self.norm_up = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        square = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        self.query, self.key, self.value, self.out = square(), square(), square(), square()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for name in ("keys", "values"):
            cache = torch.zeros(1, HEADS // shards, CONTEXT, WIDTH // HEADS)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, position: Tensor | None) -> Tensor:
        """Adds to ``x``, of sizes (batch, tokens, width); ``position``: that of the only token, for the caches."""
        y = self.norm_in(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if position is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            seen = torch.arange(CONTEXT) <= position
            y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        more: Tensor = self.down(F.gelu(self.up(self.norm_up(x))))
        return x + more


class Transformer(nn.Module):
    """A model of bytes."""

    def __init__(self, layers: int = LAYERS, shards: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(shards) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        """Returns the logits of the next bytes."""
        places = torch.arange(tokens.shape[1]) if position is None else position
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x, position)
        logits: Tensor = self.head(self.norm(x))
        return logits


def bar(steps: int, label: str) -> Iterable[int]:
    """Returns the steps, under a progress bar on rank 0."""
    hidden, console = dist.get_rank() != 0, Console(stderr=True)
    return track(range(steps), label, console=console, transient=True, disable=hidden)


def train(model: nn.Module, steps: int) -> None:
    """Trains until the model knows the documentation of ``all_reduce`` by heart; alike on all ranks."""
    text = (inspect.getdoc(dist.all_reduce) or "").encode()[: CONTEXT + 1]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None].long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in bar(steps, "training"):
        loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def shard(whole: Transformer, group: dist.ProcessGroup) -> nn.Module:
    """Returns a model with the weights of ``whole``, split over the ranks of a group."""
    # DTensor takes meshes without names for equal, and then calls the group of the first one.
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    model = Transformer(len(whole.layers), mesh.size()).eval().requires_grad_(False)
    model.load_state_dict(whole.state_dict())
    for layer in model.layers:
        parallelize_module(layer, mesh, SPLIT)
    return model


@torch.no_grad()
def generate(step: Callable[[Tensor, Tensor], Tensor], label: str) -> tuple[bytes, float]:
    """Returns the prompt with the likeliest bytes after it, and the tokens a second."""
    written, times = list(PROMPT), []
    for at in bar(CONTEXT, label):
        start = time.perf_counter()
        logits = step(torch.tensor([[written[at]]]), torch.tensor([at]))
        if at + 1 == len(written):
            written.append(int(logits.argmax()))
        times.append(time.perf_counter() - start)
    return bytes(written), 1 / statistics.median(times)


def main(layers: int = LAYERS) -> None:
    """Trains, generates in all ways, and prints the tokens a second."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Transformer(layers)
    train(model, 100)
    sharded = {name: shard(model, dist.new_group(backend=name)) for name in ("gloo", "fastcoll")}
    plain = partial(torch.compile, fullgraph=True)
    ways = {
        "gloo, eager": sharded["gloo"],
        "fastcoll, eager": sharded["fastcoll"],
        "gloo, torch.compile": plain(sharded["gloo"]),
        "fastcoll, torch.compile": plain(sharded["fastcoll"]),
        "fastcoll, fastcoll.compile": fastcoll.compile(sharded["fastcoll"], fullgraph=True),
    }
    texts = set()
    for way, step in ways.items():
        text, speed = generate(step, way)
        texts.add(text)
        if dist.get_rank() == 0:
            print(f"{way:27} {speed:6.0f} tokens/s")
    assert len(texts) == 1, "the ways generated different text"
    if dist.get_rank() == 0:
        print(texts.pop().decode().replace("\n\n", "\n"))


if __name__ == "__main__":
    dist.init_process_group("fastcoll")
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
