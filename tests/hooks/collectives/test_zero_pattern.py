"""DeepSpeed's ZeRO, stages 1 and 2: buckets are all-reduced on a copy of the default group, and weights gathered.

DeepSpeed need not be installed. `docs/loops-without-ddp.md` has a script that takes it.
"""

import pytest
import torch
import torch.distributed as dist

import gradwire

COUNT, STEPS, RATE = 6000, 40, 0.05
OTHERS = (dist.ReduceOp.MAX, dist.ReduceOp.SUM)  # of an overflow's flag, of a norm's square


def trained(rank, size, dtype, whose):
    """Weights after some steps of SGD towards the mean of all ranks' targets, and the compressed calls."""
    clone = dist.new_group(list(range(size)))
    handle = gradwire.compress_group({"the clone": clone, "the default group": None}[whose], min_bytes=2 * COUNT)
    targets = [torch.randn(COUNT, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    weights = torch.zeros(COUNT)
    parts = list(weights.chunk(size))
    for _ in range(STEPS):
        bucket = (weights - targets[rank]).to(dtype).div_(size)
        dist.all_reduce(bucket, group=clone)
        for op in OTHERS:
            dist.all_reduce(torch.zeros(1), op, clone)
        parts[rank] -= RATE * bucket.chunk(size)[rank].float()
        dist.all_gather_into_tensor(weights, parts[rank], clone)
    calls = handle.stats().calls
    handle.close()
    mean = sum(targets) / size
    return calls, float((weights - (1 - (1 - RATE) ** STEPS) * mean).abs().max()), float(weights.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_are_compressed_on_the_copy_of_the_group_that_zero_makes(ranks, dtype):
    found = ranks.run(trained, 2, dtype, "the clone")
    assert len({total for _, _, total in found}) == 1  # all ranks have the same weights
    for calls, error, _ in found:
        assert calls == STEPS
        assert 1e-6 < error < 0.05


def test_the_default_group_is_not_the_one_that_zero_calls(ranks):
    for calls, error, _ in ranks.run(trained, 2, torch.float32, "the default group"):
        assert calls == 0
        assert error < 1e-5
