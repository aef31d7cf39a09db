"""Muon in float32 against torch's, and against singular values."""

import pytest
import torch
from torch import nn

from gradwire.experiments.workloads.muon import Muon, orthonormalized

LR = 0.02


def matrix(rows, columns, seed=0):
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape):
    given = matrix(*shape).detach()
    left, values, right = torch.linalg.svd(orthonormalized(given), full_matrices=False)
    expected, _, right_of_given = torch.linalg.svd(given, full_matrices=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(left @ right, expected @ right_of_given, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_updates_are_torchs_within_bfloat16(shape):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    mine, theirs = matrix(*shape), matrix(*shape)
    optimizers = Muon([mine], LR), torch.optim.Muon([theirs], LR, adjust_lr_fn="match_rms_adamw")
    before = mine.detach().clone()
    for step in range(4):
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = matrix(*shape, seed=step + 1).detach()
            optimizer.step()
    assert (mine - theirs).norm() < 0.02 * (theirs - before).norm()
