"""A bucket that is sent in slices, each of which knows what parts of which parameters it has."""

import pytest
import torch

from gradwire.compress import Ranks
from gradwire.ddp_core.buckets.grad_bucket import layout_of
from gradwire.ddp_core.buckets.slices import CutBucket


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_parts_of_all_slices_are_the_parameters_piece_by_piece(dtype):
    parameters = [torch.zeros(3, 700, dtype=dtype), torch.zeros(100, dtype=dtype)]
    bucket = CutBucket(0, (0, 1), parameters, last=True, alias=False)
    bucket.cut(4)
    named = dict(zip("ab", parameters, strict=True))
    whole = layout_of(named, dtype.to_real(), torch.device("cpu"), Ranks(2))
    cuts = [each.layout(whole) for each in bucket.slices]
    assert [cut.numel for cut in cuts] == [each.flat.numel() * (2 if dtype.is_complex else 1) for each in bucket.slices]
    parts = [part for cut in cuts for part in zip(cut.names, cut.starts, cut.sizes, strict=True)]
    for name, size in zip(whole.names, whole.sizes, strict=True):
        mine = [(start, elements) for found, start, elements in parts if found == name]
        assert [start for start, _ in mine] == [
            sum(elements for _, elements in mine[:place]) for place in range(len(mine))
        ]
        assert sum(elements for _, elements in mine) == size
