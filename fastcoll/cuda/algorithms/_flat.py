"""Lists of tensors as one bucket: launches that gather tensors into a bucket and scatter them from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastcoll.buckets import BucketLayout
from fastcoll.cuda.algorithms.algorithm import BUCKET_GRAIN, Launch, Piece, Site
from fastcoll.kernels.flatten import Flatten
from fastcoll.kernels.unflatten import Unflatten

__all__ = ["copy_in", "copy_out", "layout_of", "outs_of", "sources_of"]


@functools.lru_cache(maxsize=64)
def layout_of(sizes: tuple[int, ...]) -> BucketLayout:
    """Returns the layout of tensors of these sizes, the same on all ranks; it keeps its tables on devices."""
    return BucketLayout(sizes, BUCKET_GRAIN)


@functools.lru_cache(maxsize=64)
def _flatten(
    sizes: tuple[int, ...], dtype: torch.dtype, wire: torch.dtype, device: torch.device
) -> Flatten:
    return Flatten(layout_of(sizes), dtype, wire, device)


@functools.lru_cache(maxsize=64)
def _unflatten(
    sizes: tuple[int, ...], wire: torch.dtype, dtype: torch.dtype, device: torch.device
) -> Unflatten:
    return Unflatten(layout_of(sizes), wire, dtype, device)


def sources_of(pieces: Sequence[Piece], dtype: torch.dtype, site: Site) -> list[Tensor]:
    """Returns this rank's inputs as tensors."""
    return [site.view(piece.source, piece.count, dtype) for piece in pieces]


def outs_of(pieces: Sequence[Piece], dtype: torch.dtype, site: Site) -> list[Tensor]:
    """Returns this rank's outputs as tensors."""
    return [site.view(piece.out, piece.count, dtype) for piece in pieces]


def copy_in(pieces: Sequence[Piece], dtype: torch.dtype, bucket: Tensor, site: Site) -> Launch:
    """Returns the launch that copies the tensors into a bucket, cast to the bucket's dtype."""
    sizes = tuple(piece.count for piece in pieces)
    flatten = _flatten(sizes, dtype, bucket.dtype, site.device)
    launch = flatten.prepare(sources_of(pieces, dtype, site), bucket)
    flatten.layout.read_here()
    return lambda place: launch(place.source)


def copy_out(
    pieces: Sequence[Piece], dtype: torch.dtype, bucket: Tensor, site: Site, scale: float = 1.0
) -> Launch:
    """Returns the launch that copies a bucket into the tensors."""
    sizes = tuple(piece.count for piece in pieces)
    unflatten = _unflatten(sizes, bucket.dtype, dtype, site.device)
    launch = unflatten.prepare(bucket, outs_of(pieces, dtype, site), scale)
    unflatten.layout.read_here()
    return lambda place: launch(place.out)
