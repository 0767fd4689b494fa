"""The benchmark between hosts, with results on rank 1 whose last element is off by one."""

from unittest import mock

from fastcoll.bench import hosts


def run_rank(arguments: list[str]) -> int:
    """Be one rank."""
    prepared = hosts._prepared

    def corrupting(*given):
        case, call = prepared(*given)

        def corrupt():
            call()
            if case.rank == 1:
                case.receive[-1] += 1

        return case, corrupt

    with mock.patch.object(hosts, "_prepared", corrupting):
        return hosts.run_rank(arguments)
