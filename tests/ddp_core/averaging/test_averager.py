"""Plug-ins are called alike on all ranks, and the first rank says once what a compressor sends in vain."""

from dataclasses import dataclass, field
from unittest import mock

import torch

import gradwire
from gradwire.compress import all_to_all

from ..errors import logged


@dataclass(frozen=True)
class Counting:
    """A plug-in with a tensor as an option, which cannot say whether it equals another one, and with a memory of its own."""

    weights: torch.Tensor
    calls: list[int] = field(default_factory=list)
    __hash__ = object.__hash__

    def init(self, layout):
        self.calls.append(layout.ranks.world_size)

    def reduce(self, grad, state, residual=None):
        self.calls.append(grad.numel())
        if residual is not None:
            grad.add_(residual.before)
            residual.after.zero_()
        rows = yield from all_to_all(grad.expand(self.calls[0], -1).contiguous())
        return rows.mean(0)


def counted(rank, world_size):
    """The calls of two plug-ins, one swapped for the other, where a launcher says that two ranks share a host."""
    used = Counting(torch.ones(3)), Counting(torch.zeros(3))
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4), compressor=used[0])
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        for following in used[::-1]:
            model(torch.ones(1, 4)).sum().backward()
            model.compression.swap(following)
    return [each.calls for each in used]


def test_every_rank_calls_a_plug_in_as_often_as_the_others(ranks):
    """Or what it draws at random would differ from there on."""
    first, *others = ranks.run(counted, 4)
    assert first[0]
    assert others == [first] * 3


def advised(rank, world_size):
    """The log's lines about what compressors send in vain, in steps with int4, bf16, and int4 again."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(64, 64, dtype=torch.bfloat16), compressor="int4")
    with logged() as lines, mock.patch.dict("os.environ", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"):
        for following in ("bf16", "int4", "none"):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            model.compression.swap(following)
    return [line for line in lines if "hosts+int4" in line or "bfloat16 already" in line]


def test_rank_zero_says_once_what_a_compressor_sends_in_vain(ranks):
    first, *others = ranks.run(advised, 4)
    assert ["hosts+int4" in line for line in first] == [True, False]
    assert others == [[], [], []]
