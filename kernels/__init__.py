"""Triton kernels: the arithmetic around a collective on CUDA tensors. Installed as fastcoll.kernels.

    flatten.py    many tensors into one flat bucket, scaled and cast: Flatten; the way back, also measured: Unflatten
    reduce.py     k buffers into one: prepare_reduce
    norm.py       the norm of gradients, and what clipping needs: prepare_norm

    peers.py           peer-mapped memory: PeerLayout, PeerBuffers, PeerFault
    staged.py          all-reduce: every rank reads all messages (one_shot), or reduces its share and then fetches the
                       others (two_shot)
    bucket_all_reduce.py   all-reduce of buckets, into the tensors
    ring.py            all-reduce, reduce-scatter, all-gather through slots of the right neighbour

    _blocks.py _dtypes.py                  device functions of the kernels
    _signals.py _exchange.py _pieces.py _ring.py _arithmetic.py
                                           shared parts of the kernels between ranks
    _configuration.py _launch.py           shared parts of launches: specialisations, compilation

Importing this package does not import Triton; importing its modules does. They do not check tensors, because
fastcoll.cuda makes them and passes only supported ones.
"""
