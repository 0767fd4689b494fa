"""All ranks of a collective in one launch on one device, to time kernels between ranks on one GPU.

The same bodies run as on many devices; the program's number determines its rank. Programs wait for each other, so all
must be on the device at once: at most one per multiprocessor is allowed. The interpreter runs the programs one after
the other, so it can run one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fastcoll.kernels import one_shot, ring, two_shot
from fastcoll.kernels._dtypes import INTERPRETED
from fastcoll.kernels.peers import PeerBuffers

if TYPE_CHECKING:
    from fastcoll._load import C

__all__ = ["prepare_every_rank"]

_PREPARE = {
    ("one_shot", "all_reduce"): one_shot.prepare_all_reduce,
    ("two_shot", "all_reduce"): two_shot.prepare_all_reduce,
    ("ring", "all_reduce"): ring.prepare_all_reduce,
    ("ring", "reduce_scatter"): ring.prepare_reduce_scatter,
}


def prepare_every_rank(
    algorithm: str,
    collective: str,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    peers: Sequence[PeerBuffers],
    *,
    op: str = "sum",
    scale: float = 1.0,
) -> C.Launch:
    """Returns one launch that runs all ranks.

    It can be repeated, and captured in a graph, as long as it is kept and the tensors keep their addresses. Call and
    capture it on the stream on which it was prepared.

    Args:
        algorithm: "one_shot", "two_shot" or "ring".
        collective: "all_reduce", or "reduce_scatter" by the ring.
        sources: The message of each rank: float32 or bfloat16, aligned to 16 bytes, as are all chunks.
        outs: The result of each rank, likewise; all in place or none.
        peers: The buffers of each rank, all on one device.
        op: As for the collective.
        scale: As for the collective.

    Raises:
        ValueError: More programs than fit on the device: they would wait for each other forever.
    """
    device, channels, ranks = peers[0].device, peers[0].layout.channels, len(peers)
    # Interpreted, only the programs of a single rank can run one after the other.
    resident = channels if INTERPRETED else _multiprocessors(device)
    if ranks * channels > resident:
        raise ValueError(
            f"ranks times channels: expected at most the {resident} programs that run at once, got {ranks} times "
            f"{channels}. Make the layout smaller."
        )
    tables = torch.tensor(
        [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, outs)],
        dtype=torch.int64,
        device=device,
    )
    # Rank 0's tensors give size and alignment for all.
    return _PREPARE[algorithm, collective](
        sources[0], outs[0], peers[0], op=op, scale=scale, _every_rank=tables
    )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
