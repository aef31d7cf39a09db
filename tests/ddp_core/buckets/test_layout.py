"""Names of parameters without what torch.compile puts into them."""

import torch
from torch import nn

import gradwire

WIDTH = 4


class Within(nn.Module):
    """A layer under torch.compile's name for it, and a weight of its own beside it."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, inputs):
        return self._orig_mod(inputs) @ self.weight


def gradients(rank, world_size, compressor):
    """The gradients of a step by their names in the model, and the names of what is held back."""
    torch.manual_seed(0)
    model = gradwire.DistributedDataParallel(Within(), compressor=compressor)
    model(torch.full((2, WIDTH), rank + 1.0)).square().sum().backward()
    return {name: each.grad for name, each in model.module.named_parameters()}, sorted(
        model.compression.state_dict()["parameters"]
    )


def test_parameters_whose_plain_names_are_alike_are_all_averaged(ranks):
    (one, _), (other, _) = ranks.run(gradients, 2, "none")
    assert len(one) == 3
    torch.testing.assert_close(one, other)


def test_parameters_whose_plain_names_are_alike_have_residuals_of_their_own(ranks):
    assert ranks.run(gradients, 1, "topk")[0][1] == ["_orig_mod.weight", "bias", "weight"]
