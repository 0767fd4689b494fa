"""How often groups of device tensors read the store."""

PROGRAM = """
import time
import device_ranks
device_ranks.prepare()
import torch
import torch.distributed as dist
from odd_stores import Between

class Noting(Between):
    def check(self, keys):
        asked.extend(keys)
        return super().check(keys)

asked = []
store = Noting(dist.HashStore())
dist.init_process_group("fastcoll", store=store, rank=0, world_size=1)
for group in [dist.new_group() for _ in range(8)]:
    dist.all_reduce(torch.ones(3, device="recording"), group=group)
asked.clear()
start = time.monotonic()
time.sleep(3.5)
print(set(asked), len(asked) < time.monotonic() - start + 2)
dist.destroy_process_group()
"""


def test_idle_groups_read_one_key(launcher, device_libraries, tmp_path):
    """Once a second, however many groups there are. A fault changes the key (test_device_faults)."""
    ended = launcher.program(PROGRAM, tmp_path, limit=100)
    assert ended.stdout == "{'fastcoll/bell'} True\n", ended.stderr
