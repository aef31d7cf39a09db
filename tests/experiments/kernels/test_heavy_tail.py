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
