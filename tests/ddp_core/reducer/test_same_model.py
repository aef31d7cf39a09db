"""Ranks that do not train the same model are told so before training starts."""

import torch
from torch import nn

import gradwire
from gradwire.compress import Dense

from ..errors import message_of


class Changed(nn.Module):
    """A model that is another one on rank 1."""

    def __init__(self, change):
        super().__init__()
        shape = (3, 2) if change == "shape" else (2, 3)
        dtype = torch.float64 if change == "dtype" else torch.float32
        self.first = nn.Parameter(torch.zeros(3))
        self.second = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=change != "requires_grad")
        if change == "strides":
            self.second = nn.Parameter(torch.zeros(3, 2).t())
        if change == "count":
            self.third = nn.Parameter(torch.zeros(1))


DIFFERENCES = {
    "shape": ["rank 0 has parameter second with shape (2, 3)", "rank 1 has parameter second with shape (3, 2)"],
    "strides": ["strides (3, 1)", "rank 1 has parameter second", "strides (1, 2)"],
    "dtype": ["torch.float32", "rank 1 has parameter second", "torch.float64"],
    "requires_grad": ["rank 1 has parameter second", "requires_grad=False"],
    "count": ["rank 0 has 2 parameters", "rank 1 has 3 parameters"],
    "compressor": ["rank 0 has the compressor none", "rank 1 has the compressor", "rank=2"],
}


def different(rank, world_size):
    messages = {}
    for change in DIFFERENCES:
        net = Changed(change if rank else "")
        compressor = "powersgd:rank=2" if rank and change == "compressor" else "none"
        messages[change] = message_of(gradwire.DistributedDataParallel, net, compressor=compressor)
    return messages


def test_different_models_are_an_error_on_every_rank_that_shows_the_first_difference(ranks):
    for messages in ranks.run(different, 3):
        for change, parts in DIFFERENCES.items():
            assert messages[change].startswith("RuntimeError: DDP expects same model across all ranks"), messages
            assert all(part in messages[change] for part in parts), messages[change]
            assert "ranks [1, 2] differ" in messages[change]


class Own(Dense):
    """A compressor whose repr holds an address."""

    __repr__ = object.__repr__


def alike(rank, world_size):
    for spec in (["bf16", {"name": "bf16"}][rank], Own()):
        gradwire.DistributedDataParallel(Changed(""), compressor=spec)


def test_equal_specifications_in_other_words_are_the_same_compressor(ranks):
    ranks.run(alike, 2)
