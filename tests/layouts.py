"""Tensors with the same content in many memory layouts."""

import torch
from torch import Tensor

FLAT = ["contiguous", "offset", "last_offset"]
DENSE = [*FLAT, "transposed"]
LAYOUTS = [*DENSE, "step", "rows", "transposed_step"]

_GAP = 77
"""The value that fills the memory between the elements."""


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a view of new memory with the tensor's content in the named layout."""
    reverse = list(reversed(range(tensor.dim())))
    shape = list(tensor.shape)
    if layout == "contiguous":
        return tensor.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        view = _filled(tensor, [shape[d] for d in reverse]).permute(reverse)
    elif layout in ("offset", "last_offset"):
        skipped = 1 if layout == "offset" else 13
        view = _filled(tensor, [tensor.numel() + 20])[skipped : skipped + tensor.numel()]
        view = view.view(shape)
    elif layout == "step":
        view = _filled(tensor, [*shape[:-1], 2 * shape[-1]])[..., ::2] if shape else _scalar(tensor)
    elif layout == "rows":
        view = _filled(tensor, [3 * shape[0], *shape[1:]])[1::3] if shape else _scalar(tensor)
    else:
        assert layout == "transposed_step", layout
        view = _filled(tensor, [2 * shape[d] for d in reverse])
        view = view[tuple(slice(1, None, 2) for _ in shape)].permute(reverse)
    view.copy_(tensor)
    return view


def gaps_untouched(view: Tensor) -> bool:
    """Return whether the memory between the view's elements still has the fill value of ``laid_out``."""
    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    copy = whole.clone()
    copy.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(_GAP)
    return torch.equal(copy, torch.full_like(copy, _GAP))


def _filled(like: Tensor, shape: list[int]) -> Tensor:
    return torch.full(shape, _GAP, dtype=like.dtype, device=like.device)


def _scalar(like: Tensor) -> Tensor:
    return _filled(like, [3])[1]
