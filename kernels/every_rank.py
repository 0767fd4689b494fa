"""All ranks of a collective in one launch on one device: to time kernels between ranks where there is one GPU.

The same bodies run as on many devices, with the rank taken from the number of the program. Programs wait for each
other, so all of them must be on the device at once: at most one per multiprocessor is asked for. The interpreter runs
one program after the other, so there it works for one rank only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcoll.kernels import one_shot, ring, two_shot
from fastcoll.kernels._dtypes import INTERPRETED
from fastcoll.kernels._peer_launch import PreparedCollective
from fastcoll.kernels.peers import PeerBuffers

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
) -> PreparedCollective:
    """Returns a launch of the parts of all ranks at once.

    It can be repeated, and captured in a graph, as long as it is kept and the tensors lie where they are. To be
    called, and captured, on the stream on which it was prepared.

    Args:
        algorithm: "one_shot", "two_shot" or "ring".
        collective: "all_reduce", or "reduce_scatter" by the ring.
        sources: The message of each rank: float32 or bfloat16, aligned to 16 bytes, as are all chunks.
        outs: The result of each rank, alike; in the place of all sources or of none.
        peers: The buffers of each rank, all on one device.
        op: As the collective takes it.
        scale: As the collective takes it.

    Raises:
        ValueError: More programs than fit on the device, which would wait for each other forever.
    """
    device, channels, ranks = peers[0].device, peers[0].layout.channels, len(peers)
    # Interpreted, only those of one rank follow each other without waiting.
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
    # Rank 0's tensors stand for all.
    return _PREPARE[algorithm, collective](
        sources[0], outs[0], peers[0], op=op, scale=scale, _every_rank=tables
    )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
