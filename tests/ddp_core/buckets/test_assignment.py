"""Which parameters share a bucket, and in what order."""

import pytest
import torch
from torch import nn

from gradwire.ddp_core.buckets.assignment import BucketAssignment, assigned, caps_in_bytes


def test_buckets_made_between_forward_and_backward_lack_all_their_gradients():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    assignment = BucketAssignment(parameters, [False] * 3, [1 << 20], alias=False)
    assignment.caps = [8]
    assignment.build([0, 1, 2])
    assert assignment.unready == [1, 1, 1]


def test_every_parameter_is_in_one_bucket_of_its_dtype_and_caps_hold():
    dtypes = [torch.float32, torch.float64, torch.complex64, torch.bfloat16]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        count = int(torch.randint(1, 30, (), generator=generator))
        sizes = torch.randint(0, 50, (count,), generator=generator).tolist()
        parameters = [torch.zeros(size, dtype=dtypes[size % 4]) for size in sizes]
        alone = (torch.rand(count, generator=generator) < 0.1).tolist()
        buckets = assigned(parameters, [100, 400], alone)
        assert sorted(index for members in buckets for index in members) == list(range(count))
        assert [members[-1] for members in buckets] == sorted(members[-1] for members in buckets)
        for members in buckets:
            assert len({parameters[index].dtype for index in members}) == 1
            assert len(members) == 1 or not any(alone[index] for index in members)
            assert sum(parameters[index].nbytes for index in members[:-1]) < 400


def test_sizes_of_buckets_that_make_no_sense_are_refused():
    for wrong in (0, -1, float("nan"), float("inf"), [1], "1"):
        with pytest.raises(ValueError, match="above 0"):
            caps_in_bytes(wrong)
    with pytest.raises(ValueError, match="above 0"):
        caps_in_bytes(None, [])
    with pytest.raises(ValueError, match="exclude each other"):
        caps_in_bytes(1, [1])
