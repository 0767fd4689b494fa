"""All ranks of a collective in one launch on one device: to time kernels between ranks where there is one GPU.

The same bodies run as on many devices, with the rank taken from the number of the program. Programs wait for each
other, so all of them must be on the device at once: at most one per multiprocessor is asked for. The interpreter runs
one program after the other, so there it works for one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from fastcoll.kernels import one_shot, ring, two_shot
from fastcoll.kernels._dtypes import INTERPRETED
from fastcoll.kernels._peer_checks import Registered
from fastcoll.kernels._peer_launch import PreparedCollective
from fastcoll.kernels.peers import PeerBuffers

__all__ = ["COLLECTIVES", "launch_every_rank", "prepare_every_rank"]

COLLECTIVES: dict[tuple[str, str], ModuleType] = {
    ("one_shot", "all_reduce"): one_shot,
    ("two_shot", "all_reduce"): two_shot,
    ("ring", "all_reduce"): ring,
    ("ring", "reduce_scatter"): ring,
}
"""Module of each (algorithm, collective) that can be played."""


def launch_every_rank(
    algorithm: str,
    collective: str,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    peers: Sequence[PeerBuffers],
    **options: Any,
) -> None:
    """Launches the parts of all ranks at once; arguments and errors are those of :func:`prepare_every_rank`."""
    prepare_every_rank(algorithm, collective, sources, outs, peers, **options)()


def prepare_every_rank(
    algorithm: str,
    collective: str,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    peers: Sequence[PeerBuffers],
    **options: Any,
) -> PreparedCollective:
    """Returns a launch of the parts of all ranks at once.

    It can be repeated, and captured in a graph, as long as it is kept and the tensors lie where they are. To be
    called, and captured, on the stream on which it was prepared.

    Args:
        algorithm: "one_shot", "two_shot" or "ring".
        collective: "all_reduce" or "reduce_scatter".
        sources: The message of each rank: float32 or bfloat16, aligned to 16 bytes, as are all chunks.
        outs: The result of each rank.
        peers: The buffers of each rank, all on one device.
        options: As the collective takes them; `registered` (of any rank) with the messages' addresses in `sources`.

    Raises:
        ValueError: No such collective, an alignment or dtype that has no kernel, more programs than fit, or tensors
            that are not alike on all ranks.
    """
    module = COLLECTIVES.get((algorithm, collective))
    if module is None:
        raise ValueError(
            f"algorithm, collective: expected one of {sorted(COLLECTIVES)}, got {(algorithm, collective)}."
        )
    ranks = peers[0].world_size
    if not ranks == len(sources) == len(outs) == len(peers):
        raise ValueError(
            f"sources, outs, peers: expected {ranks} of each, got {len(sources)}, {len(outs)}, {len(peers)}."
        )
    _require_places(sources, outs, options.get("registered"))
    if INTERPRETED and ranks > 1:
        raise ValueError(
            f"ranks: expected 1 where kernels are interpreted, as programs run one after the other, got {ranks}."
        )
    device = peers[0].device
    resident = 1 << 30 if INTERPRETED else _multiprocessors(device)
    if ranks * peers[0].layout.channels > resident:
        raise ValueError(
            f"channels: expected at most {resident // ranks} for {ranks} ranks on a device of {resident} "
            f"multiprocessors, got {peers[0].layout.channels}. Make the layout smaller."
        )
    for name, tensors in (("sources", sources), ("outs", outs)):
        for rank, tensor in enumerate(tensors):
            first = tensors[0]
            alike = (tensor.shape, tensor.dtype, tensor.device) == (
                first.shape,
                first.dtype,
                device,
            )
            if not alike or not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(
                    f"{name}[{rank}]: expected a contiguous, aligned tensor like {name}[0] on {device}, got "
                    f"{tuple(tensor.shape)} {tensor.dtype} at {hex(tensor.data_ptr())}. Correct the argument."
                )
    tables = torch.tensor(
        [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, outs)],
        dtype=torch.int64,
        device=device,
    )
    prepare = getattr(module, f"prepare_{collective}")
    # Rank 0's tensors stand for all.
    launch: PreparedCollective = prepare(
        sources[0], outs[0], peers[0], _every_rank=tables, **options
    )
    return launch


def _require_places(
    sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], registered: Registered | None
) -> None:
    """Checks what the collective's own checks, which see rank 0's tensors only, cannot.

    Raises:
        ValueError: Some ranks reduce in place and others do not, or the registered messages are not `sources`.
    """
    in_place = [
        source.data_ptr() == out.data_ptr() for source, out in zip(sources, outs, strict=True)
    ]
    if len(set(in_place)) > 1:
        raise ValueError(
            f"outs: expected all in the place of their sources or none, got {in_place}. Correct the argument."
        )
    addresses = tuple(source.data_ptr() for source in sources)
    if registered is not None and registered.addresses != addresses:
        raise ValueError(
            f"registered: expected the addresses of sources, {addresses}, got {registered.addresses}. "
            "Register the tensors that are reduced."
        )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
