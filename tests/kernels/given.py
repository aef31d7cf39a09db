"""Flat tensors that the tests of kernels start from."""

import torch


def numbers(size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def poisoned(size, dtype):
    return torch.full((size,), torch.nan, dtype=dtype)
