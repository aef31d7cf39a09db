import pytest
import torch.distributed as dist


@pytest.fixture
def group():
    """The default group, of this process alone: for what needs a group, and no other rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
