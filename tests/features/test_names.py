"""FASTCOLL_DEFAULT and FASTCOLL_REPLACE: scripts that name another backend, or none, run on fastcoll.

Each script is one that a user has: no line of it knows fastcoll. What really served it is asked of
`fastcoll.info.groups()` at the end.
"""

import pickle
import textwrap

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO
from on_ranks import on_ranks
from programs import python

from fastcoll import names

pytestmark = pytest.mark.skipif(IS_GLOO, reason="is about fastcoll's own settings")

HEAD = "import os, sys, torch, torch.distributed as dist\n"

END = """
import fastcoll.info
for group in fastcoll.info.groups():
    print(group["name"], sorted(group["backends"].items()), group.get("transport"))
dist.destroy_process_group()
"""


@pytest.fixture
def run(launcher, tmp_path):
    """``run(script, NAME="value")`` returns the lines of rank 0, and all that went to stderr."""

    def run(script: str, ranks: int = 2, **environ: str) -> tuple[list[str], str]:
        text = "from fastcoll import names\nnames.apply()\n" + HEAD + textwrap.dedent(script) + END
        ended = launcher.ranks(text, ranks, tmp_path, **environ)
        errors = "".join(rank.stderr for rank in ended)
        assert not any(rank.status for rank in ended), errors
        return ended[0].stdout.splitlines(), errors

    return run


def test_who_names_gloo_is_served_and_told_once(run):
    lines, errors = run(
        """
        dist.init_process_group("gloo")
        print(dist.get_backend(), dist.get_backend() == "gloo", dist.get_backend() in ("nccl", "gloo"))
        other = dist.new_group([0, 1], backend="gloo")
        mixed = dist.new_group([0, 1], backend="cpu:gloo")
        x = torch.ones(3)
        for group in (None, other, mixed):
            dist.all_reduce(x, group=group)
        print(x.tolist())
        dist.monitored_barrier()  # torch keeps it to the name
        # What is made with options of Gloo stays Gloo.
        Gloo = dist.ProcessGroupGloo
        store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
        options = Gloo._Options()
        options._devices = [Gloo.create_default_device()]
        own = Gloo(store, dist.get_rank(), 2, options)
        x = torch.ones(2)
        own.allreduce([x]).wait()
        print(own.name(), x.tolist(), isinstance(own, Gloo))
        """,
        FASTCOLL_REPLACE="gloo",
    )
    assert lines[:3] == ["fastcoll True True", "[8.0, 8.0, 8.0]", "gloo [2.0, 2.0] True"]
    assert [line.split(" ", 1)[1] for line in lines[3:]] == [
        "[('cpu', 'fastcoll'), ('cuda', 'fastcoll')] shm"
    ] * 2 + ["[('cpu', 'fastcoll')] shm"]
    assert errors.count("[fastcoll] serves the groups that name gloo (FASTCOLL_REPLACE)") == 1


def test_a_group_made_by_class_is_served_and_told(run):
    """As frameworks for serving make groups for their control plane, beside the default group or without one."""
    lines, errors = run(
        """
        from datetime import timedelta
        from torch.distributed import PrefixStore, ProcessGroup, TCPStore
        from torch.distributed.distributed_c10d import ProcessGroupGloo
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        store = PrefixStore("control", dist.distributed_c10d._get_default_store())
        group = ProcessGroup(store, rank, 2)
        backend = ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=40))
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        x = torch.full((3,), rank + 1.0)
        group.allreduce([x]).wait()
        group.barrier().wait()
        if rank == 0:
            group.send([x], 1, 5).wait()
        else:
            y = torch.empty(3)
            group.recv([y], 0, 5).wait()
            assert y.tolist() == [3.0] * 3
        print(backend.name(), x.tolist(), backend.options.timeout.seconds, backend.transport())
        by_place = ProcessGroupGloo(PrefixStore("2", store), rank, 2, timedelta(seconds=50))
        print(by_place.name(), by_place.options.timeout.seconds)
        assert isinstance(backend, ProcessGroupGloo) and not isinstance(group, ProcessGroupGloo)
        found = [None] * 2
        dist.all_gather_object(found, rank, group=backend)  # torch warns, and takes it
        assert found == [0, 1]
        class Own(ProcessGroupGloo):
            pass
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        own = Own(PrefixStore("3", store), rank, 2, options)
        assert type(own) is Own and isinstance(own, Own) and not isinstance(backend, Own)
        try:
            ProcessGroupGloo(store, 3, 2)
        except ValueError as error:
            print(error)
        group.shutdown()
        """,
        FASTCOLL_REPLACE="gloo",
    )
    assert lines[:2] == ["fastcoll [3.0, 3.0, 3.0] 40 shm", "fastcoll 50"]
    assert "expected a rank from 0" in lines[2] and "'ProcessGroupGloo'" in lines[2]
    assert errors.count("[fastcoll] serves the groups that name gloo (FASTCOLL_REPLACE)") == 1


def test_who_names_none_is_served_by_the_default(run):
    lines, _ = run(
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.parallel import DistributedDataParallel
        mesh = init_device_mesh("cpu", (2,))  # makes the default group
        print(dist.get_backend(), dist.get_backend() == "gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        named = dist.new_group([0, 1], backend="gloo")
        """,
        FASTCOLL_DEFAULT="1",
    )
    assert lines[0] == "fastcoll False"
    serving = [line.split(" ", 1)[1] for line in lines[1:]]
    assert "[('cpu', 'fastcoll'), ('cuda', 'fastcoll')] shm" in serving
    assert any("'gloo'" in line for line in serving), "who names gloo gets gloo"


def test_make_default_in_a_script(run):
    """And a variable that is misspelt."""
    lines, errors = run(
        """
        import fastcoll
        fastcoll.make_default()
        dist.init_process_group()
        dist.barrier(device_ids=[0])
        fastcoll.monitored_barrier()
        fastcoll.monitored_barrier()  # the import of its module leaves the name
        print(dist.get_backend())
        """,
        FASTCOLL_SHARED_MEMRY="off",
    )
    assert lines[0] == "fastcoll"
    misspelt = (
        "unknown variable FASTCOLL_SHARED_MEMRY is ignored. Did you mean FASTCOLL_SHARED_MEMORY?"
    )
    assert misspelt in errors


BAD_VALUES = {
    "FASTCOLL_REPLACE": ("mpi", "FASTCOLL_REPLACE=mpi: expected backends of gloo, nccl"),
    "FASTCOLL_DEFAULT": ("tpu", "FASTCOLL_DEFAULT=tpu: expected 1, 0, or devices of cpu, cuda"),
}


@pytest.mark.parametrize("variable", BAD_VALUES)
def test_a_bad_value_is_an_error(variable):
    value, expected = BAD_VALUES[variable]
    with pytest.raises(ValueError, match=expected):
        names.apply({variable: value})


@pytest.mark.full
def test_a_bad_value_is_told_and_torch_is_imported():
    value, expected = BAD_VALUES["FASTCOLL_DEFAULT"]
    text = "import torch; print(torch.distributed.Backend('gloo'))"
    done = python("-c", text, variables={"FASTCOLL_DEFAULT": value})
    assert done.stdout == "gloo\n"
    assert expected in done.stderr


def test_options_of_another_backend(run):
    """Those of Gloo, of no backend, and of NCCL; the default group names no backend.

    A torch without CUDA has no class for NCCL's: its attributes, on another backend's options.
    """
    lines, errors = run(
        """
        import datetime

        class StockOptions(dist.ProcessGroupGloo._Options):
            is_high_priority_stream = False

            class config:
                blocking, cga_cluster_size, min_ctas, max_ctas = 0, -(2**31), 2, 16
                net_name, max_p2p_peers, num_rma_ctx = None, 8, -(2**31)

                def unsafe_get_ptr(self):
                    raise AssertionError

        dist.init_process_group()
        dist.barrier()
        print(dist.get_backend() == "gloo")
        given = StockOptions()
        given._timeout = datetime.timedelta(seconds=77)
        group = dist.new_group([0], backend="gloo", pg_options=given)
        options = group._get_backend(torch.device("cpu")).options
        config = options.config
        print(options.is_high_priority_stream, config.min_ctas, config.max_ctas)
        print(config.cga_cluster_size, config.net_name, options.timeout)
        print("then", file=sys.stderr)
        dist.new_group([0], backend="gloo", pg_options=dist.ProcessGroupGloo._Options())
        try:
            dist.new_group([0], backend="fastcoll", pg_options=object())
        except TypeError as error:
            print(error)
        """,
        ranks=1,
        FASTCOLL_REPLACE="gloo",
    )
    assert lines[:3] == ["True", "False 2 16", "None None 0:01:17"]
    assert "'fastcoll'" in lines[4] and "'gloo'" not in lines[4]
    of_nccl, of_gloo = errors.split("then\n")
    assert "without its pg_options" not in of_nccl
    # A field that a newer NCCL has is not dropped without a word.
    assert "fastcoll.Options ignores config.max_p2p_peers = 8" in of_nccl
    assert of_nccl.count("ignores config.") == 1
    assert "without its pg_options of" in of_gloo
    expected = "expected pg_options of type fastcoll.Options or None for group '3'"
    assert f"{expected}, got builtins.object" in lines[3]


def test_a_served_name_is_both():
    name = names.ServedName("fastcoll", "gloo")
    assert [name == other for other in ("fastcoll", "gloo", "nccl")] == [True, True, False]
    assert [name != other for other in ("fastcoll", "gloo", "nccl")] == [False, False, True]
    assert str(name) == f"{name}" == "fastcoll" and {"fastcoll": 1}[name] == 1
    assert pickle.loads(pickle.dumps(name)) == "gloo"


@on_ranks(1, init=False)
def test_a_served_name_is_compared_in_compiled_code():
    name = names.ServedName("fastcoll", "gloo")

    @torch.compile(backend="eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if name == "gloo" else x

    assert double(torch.ones(1)).item() == 2


@on_ranks(1, init=False, fresh=True)
def test_only_the_named_backend_of_a_group_of_two_is_served():
    names.replace("gloo")
    assert dist.Backend("cpu:gloo,cuda:nccl") == "cpu:fastcoll,cuda:nccl"
    assert dist.Backend("nccl") == "nccl"
    assert dist.Backend("gloo") == "fastcoll"
