"""The benchmark under a launcher of MPI, with a stand-in for mpi4py: one rank, whose all-reduce has nothing to do."""

import os
from pathlib import Path

import pytest
from programs import python

from fastcoll.bench.record import read_record

pytestmark = pytest.mark.full

RC = "class rc:\n    thread_level = 'multiple'\n"
MPI = """
import mpi4py
assert mpi4py.rc.thread_level == "funneled"
IN_PLACE, SUM, FLOAT, DATATYPE_NULL = object(), object(), object(), object()
BFLOAT16_T = DATATYPE_NULL
class buffer:
    fromaddress = staticmethod(lambda address, size: memoryview(bytes(size)))
class COMM_WORLD:
    rank, size = 0, 1
    bcast = staticmethod(lambda value: value)
    allgather = staticmethod(lambda value: [value])
    Barrier = Allgather = Reduce_scatter_block = Bcast = Alltoall = staticmethod(lambda *_: None)
    Sendrecv = Reduce = Gather = Scatter = Barrier
    @staticmethod
    def Allreduce(sent, received, op):
        assert sent is IN_PLACE and received[1] is FLOAT and op is SUM
def Get_library_version():
    return "an MPI\\nand more"
"""


def bench(tmp_path: Path, *arguments: object, ranks: int = 1):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(RC)
    (tmp_path / "mpi4py" / "MPI.py").write_text(MPI)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "PMI_SIZE": str(ranks)}
    return python("-m", "fastcoll.bench", *arguments, variables=variables)


def test_mpi_takes_turns_in_the_rank(tmp_path):
    record = tmp_path / "result.jsonl"
    flags = "all_reduce -b 4 -e 4 -d float,bfloat16 -n 2 --rounds 1 --backend fastcoll,mpi"
    ended = bench(tmp_path, *flags.split(), "--json", record)
    assert ended.returncode == 0, ended
    written = read_record(record)
    assert (written["world_size"], written["left_out"]) == (1, {})
    assert written["libraries"]["mpi"] == "an MPI"
    narrow, wide = sorted(written["cases"], key=lambda case: case["dtype"])
    wrong = {name: backend["wrong"] for name, backend in wide["backends"].items()}
    assert wrong == {"fastcoll": 0, "mpi": 0}
    assert "no type for torch.bfloat16" in narrow["unsupported"]["mpi"]


def test_a_launcher_of_another_mpi_is_refused(tmp_path):
    ended = bench(tmp_path, "--backend", "mpi", ranks=2)
    assert ended.returncode == 1
    assert "mpiexec started 2 ranks, and mpi4py sees 1" in ended.stderr
