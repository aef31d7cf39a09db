"""Averages that are rounded once."""

import torch

from gradwire.compress.algorithms.payload import rounded_once


def test_a_mean_in_16_bits_is_written_in_32_and_what_rounding_takes_is_kept():
    mean = torch.linspace(-1, 1, 33)
    out, residual = torch.empty(33, dtype=torch.bfloat16), torch.ones(33)
    rounded_once(out, residual, lambda wide: wide.copy_(mean))
    assert torch.equal(out, mean.bfloat16())
    assert torch.equal(residual, 1 + (mean - mean.bfloat16().float()))


def test_a_mean_in_32_bits_is_written_where_it_goes():
    out, residual, written = torch.empty(3), torch.ones(3), []
    rounded_once(out, residual, written.append)
    assert written[0] is out
    assert torch.equal(residual, torch.ones(3))
