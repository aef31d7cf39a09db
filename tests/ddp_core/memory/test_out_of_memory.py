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
ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory")
ON_GPU = torch.OutOfMemoryError("CUDA out of memory")


def of_a_bucket():
    BucketMemory(compressor("topk"), HUGE, 0)


def of_shards():
    ShardMemory(shard_sum("int4")).get(0, ShardLayout(HUGE, (0,)))


@pytest.mark.parametrize(("state", "name"), [(of_a_bucket, "topk"), (of_shards, "reduce=")])
def test_a_state_that_does_not_fit_names_the_compressor_and_what_it_keeps(state, name):
    words = rf"the state of {name}.* 4\.0 bytes per parameter.*residual_bits=8"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        state()


def test_other_errors_pass_as_they_are():
    def fail():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        allocated(fail, lambda: ("topk", 0), HUGE)


@pytest.mark.parametrize("error", [MemoryError(), ON_CPU, ON_GPU])
def test_errors_of_memory_are_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("can't allocate memory"))
