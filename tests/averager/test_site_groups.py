"""The groups in which the ranks of a site talk about their averager."""

from pathlib import Path

import torch.distributed as dist

from averaging.training import ControlGroup


def test_the_next_averager_of_all_ranks_gets_a_group_of_another_name(tmp_path: Path) -> None:
    """With the same name its ranks could read the addresses of the group before it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        names = []
        for _ in range(2):
            group = ControlGroup([0])
            names.append(group._group.group_name)
            group.close()
        assert names[0] != names[1]
    finally:
        dist.destroy_process_group()
