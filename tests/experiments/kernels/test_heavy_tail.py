import pytest
import torch

from .given import SIZE


def test_what_is_filled_has_a_heavy_tail_no_zeros_and_is_always_different(numbers):
    first, second = torch.zeros(2, SIZE)
    numbers.fill(first)
    numbers.fill(second)
    assert not torch.equal(first, second)
    assert (first != 0).all()
    assert first.abs().max() > 30 * first.abs().median()
    assert first.double().pow(4).mean() / first.double().square().mean() ** 2 > 10


@pytest.mark.parametrize(("count", "length"), [(1, 1), (7, 7), (10, 1000), (400, 40_000)])
def test_positions_are_ascending_and_all_different(numbers, count, length):
    out = torch.zeros(3, 1, count, dtype=torch.int32)
    numbers.positions(count, length, out)
    assert (out >= 0).all()
    assert (out < length).all()
    assert (out.diff(dim=-1) > 0).all()
