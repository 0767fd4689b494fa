"""Which model each of fastcoll's own algorithms follows.

Not every model is of an algorithm that fastcoll has (the hierarchical ones are what several nodes of devices would
need), and the names differ where the literature's does: what the CUDA engine calls all_to_all is a pairwise exchange in
both phases. Between hosts the ranks of a model are hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IMPLEMENTED", "Implemented"]


@dataclass(frozen=True)
class Implemented:
    """An algorithm of fastcoll.

    Attributes:
        tensors: "CUDA" or "CPU".
        collective: What it computes.
        name: Of the algorithm, as its engine names it; FASTCOLL_ALGO=nccl takes all_to_all where a wire is narrower.
        source: Its file, in the repository.
        models: Names in ``ALGORITHMS[collective]``; of several, the one that the library under it chooses.
        remark: Where it departs from the model, or "".
    """

    tensors: str
    collective: str
    name: str
    source: str
    models: tuple[str, ...]
    remark: str = ""


def _cuda(name: str, *models: str, remark: str = "") -> Implemented:
    source = f"fastcoll/cuda/algorithms/{name}.py"
    return Implemented("CUDA", "all_reduce", name, source, models or (name,), remark)


def _cpu(collective: str, name: str, file: str, model: str, remark: str = "") -> Implemented:
    return Implemented("CPU", collective, name, f"csrc/algorithms/{file}.cpp", (model,), remark)


def _between_hosts(collective: str, file: str, model: str, remark: str = "") -> Implemented:
    source = f"csrc/hosts/{file}.cpp"
    return Implemented("CPU", collective, f"{model} between hosts", source, (model,), remark)


_SEGMENTS = (
    "once for each segment, pipelined: the latencies of all but the first pass while bytes travel"
)

IMPLEMENTED = (
    _cuda("one_shot"),
    _cuda("two_shot"),
    _cuda("ring"),
    _cuda("all_to_all", "pairwise", remark="over NCCL; S in the wire's dtype, the sum in float32"),
    _cuda("nccl", "ring", "tree", remark="NCCL's choice: --simulate prints its own model of it; NVLS is in that alone"),
    _cpu("all_reduce", "one_shot", "one_shot_all_reduce", "one_shot"),
    _cpu("all_reduce", "segmented", "segmented_all_reduce", "two_shot", _SEGMENTS),
    _cpu(
        "all_reduce", "direct", "direct_all_reduce", "two_shot",
        "results are written to the peers, not read from them; tensors of empty_shared",
    ),
    _cpu("reduce_scatter", "segments", "reduce_scatter", "direct", _SEGMENTS),
    _cpu("all_gather", "segments", "all_gather", "direct", _SEGMENTS),
    _between_hosts("all_reduce", "reduce", "one_shot"),
    _between_hosts("all_reduce", "reduce", "two_shot", _SEGMENTS),
    _between_hosts("reduce_scatter", "reduce", "direct", _SEGMENTS),
    _between_hosts("all_gather", "exchange", "direct", _SEGMENTS),
    _between_hosts("broadcast", "broadcast", "flat"),
    _between_hosts("broadcast", "broadcast", "scatter_all_gather"),
    _between_hosts("broadcast", "broadcast", "chain", "k is that of chunks of 64 KiB or more"),
)  # fmt: skip
"""All that have a model: of the collectives in ALGORITHMS."""
