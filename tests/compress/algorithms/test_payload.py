"""Rows on the wire: where they begin, and what pads them."""

import pytest
import torch

from gradwire.compress import OneBit, TopK
from gradwire.compress.algorithms.adapters import Gathered
from gradwire.compress.algorithms.payload import padded

from ..given import layout


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 4095, 4096, 4097, 1_000_001])
def test_rows_are_a_little_longer_than_what_they_hold(size):
    assert padded(size) % (128 if size >= 4096 else 16) == 0
    assert 0 <= padded(size) - size < (1 + size / 32 if size >= 4096 else 16)


@pytest.mark.parametrize("codec", [OneBit(), OneBit(block=8), TopK(), TopK(value_dtype="fp16"), TopK(k=1)], ids=str)
@pytest.mark.parametrize("numel", [1, 100, 5_000, 300_001])
def test_each_rank_s_row_begins_at_a_multiple_of_16_bytes(codec, numel):
    assert codec.row_bytes(codec.row_length(numel)) % 16 == 0


@pytest.mark.parametrize(
    ("codec", "held"), [(TopK(k=3), 24), (OneBit(rotate=False), 4 + 13), (OneBit(block=128), 4 + 16)], ids=str
)
def test_what_pads_a_row_is_zero(codec, held):
    torch.empty(1 << 12, dtype=torch.uint8).fill_(255)  # for memory that is not what it was
    gathered = Gathered(codec)
    request = next(gathered.reduce(torch.linspace(-1, 1, 100), gathered.init(layout((100,)))))
    assert request.tensor.shape == (1, 32)
    assert not request.tensor[:, held:].any()
