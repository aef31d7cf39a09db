"""A state that does not fit is refused with what it takes and what takes less."""

import pytest
import torch

from gradwire.compress import Layout, compressor
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.reduction import shard_sum
from gradwire.ddp_core.memory.bucket_memory import BucketMemory
from gradwire.ddp_core.memory.out_of_memory import allocated, is_out_of_memory
from gradwire.ddp_core.memory.shard_memory import ShardMemory

HUGE = Layout(("w",), ((1 << 44,),), torch.float32, torch.device("cpu"))  # 70 TB
ON_CPU, ON_GPU = (
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
)


def test_a_state_that_does_not_fit_names_the_compressor_and_what_it_keeps():
    with pytest.raises(torch.OutOfMemoryError, match=r"the state of topk.* 4\.0 bytes per parameter.*residual_bits=8"):
        BucketMemory(compressor("topk"), HUGE, 0)


def test_a_state_of_shards_that_does_not_fit_says_so_too():
    memory = ShardMemory(shard_sum("int4"))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"the state of reduce=.* 4\.0 bytes per parameter.*residual_bits=8"
    ):
        memory.get(0, ShardLayout(HUGE, (0,)))


def test_other_errors_pass_as_they_are():
    def fail():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        allocated(fail, lambda: ("topk", 0), HUGE)


@pytest.mark.parametrize("error", [MemoryError(), ON_CPU, ON_GPU])
def test_errors_of_memory_are_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("can't allocate memory"))
