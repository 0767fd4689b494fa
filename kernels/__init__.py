"""Triton kernels: the arithmetic around a collective on CUDA tensors. Installed as fastcoll.kernels.

    flatten.py    many tensors into one flat bucket, scaled and cast: Flatten
    unflatten.py  the way back: Unflatten
    reduce.py     k buffers into one: prepare_reduce

    peers.py           memory that ranks map of each other: PeerLayout, PeerBuffers, PeerFault
    one_shot.py        all-reduce: every rank reads all messages
    two_shot.py        all-reduce: every rank reduces its share, then fetches the others
    bucket_all_reduce.py   the same of buckets, into the tensors
    ring.py            all-reduce, reduce-scatter, all-gather through slots of the right neighbour
    every_rank.py      one launch that plays all ranks, for timing on one GPU

    _blocks.py _move.py _dtypes.py         what kernels share inside
    _signals.py _exchange.py _pieces.py _ring.py _arithmetic.py _peer_launch.py
                                           the same of those between ranks
    _plan.py _configuration.py _launch.py _prepared.py
                                           what launchers share: tables, specialisations, the launch

Importing this package imports no Triton; its modules do. They check no tensors: fastcoll.cuda makes those that they
get, and chooses only what they can do.
"""
