"""A state that does not fit is refused with what it takes and what takes less."""

import pytest
import torch

from gradwire.compress import Layout, compressor
from gradwire.ddp_core.memory.bucket_memory import BucketMemory
from gradwire.ddp_core.memory.out_of_memory import allocated, is_out_of_memory

HUGE = Layout(("w",), ((1 << 44,),), torch.float32, torch.device("cpu"))  # 70 TB


def test_a_state_that_does_not_fit_names_the_compressor_and_what_it_keeps():
    with pytest.raises(torch.OutOfMemoryError, match=r"the state of topk.* 4\.0 bytes per parameter.*residual_bits=8"):
        BucketMemory(compressor("topk"), HUGE, 0)


def test_other_errors_pass_as_they_are():
    def fail():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else$"):
        allocated(fail, compressor("topk"), HUGE)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_errors_of_memory_are_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("can't allocate memory"))
