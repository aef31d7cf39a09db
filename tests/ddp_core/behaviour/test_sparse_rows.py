"""Sparse gradients beside compressed ones."""

import itertools

import pytest
import torch
from torch import nn

import gradwire

from ..chain import SMALL, WIDTH, Chain
from ..nets import same


class SparseBesideDense(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.rows, self.chain = nn.Embedding(50, WIDTH, sparse=True), Chain()

    def forward(self, tokens):
        return self.chain(self.rows(tokens))


def sparse_beside(rank, world_size, spec):
    """The mean gradient of the rows by hand, ours, and the bytes that the rows cost."""
    model = gradwire.DistributedDataParallel(SparseBesideDense(), compressor=spec, **SMALL)
    alone = SparseBesideDense()
    for step in range(2):
        model.zero_grad()
        tokens = [torch.tensor([1, 3 * member, 7 + step]) for member in range(world_size)]
        model(tokens[rank]).square().sum().backward()
    records = [bucket for bucket in model.compression.stats().buckets if bucket.parameters == ("rows.weight",)]
    for mine in tokens if spec == "none" else ():
        (alone(mine).square().sum() / world_size).backward()
    gradient, expected = model.module.rows.weight.grad, alone.rows.weight.grad
    return gradient.is_sparse, gradient.to_dense(), expected.to_dense() if spec == "none" else None, records


def sparse_overflow(rank, world_size, rows_first):
    """Whether a step changed what is held back, for each step but the first; in one step a row's gradient is infinite."""
    network = SparseBesideDense()
    if rows_first:
        network.rows = network._modules.pop("rows")  # registered last, and so reduced first
    model = gradwire.DistributedDataParallel(network, compressor="topk:ratio=0.1", undo=True, **SMALL)
    held = []
    for step, factor in enumerate([float("inf"), float("inf"), 1.0] if rows_first else [1.0, 1.0, float("inf"), 1.0]):
        model.zero_grad()
        rows = model.module.rows(torch.tensor([rank, step]))
        loss = model(torch.tensor([1, step])).square().sum() + (rows * factor).sum()
        loss.backward()
        held.append([fields["residual"] for fields in model.compression.state_dict()["parameters"].values()])
    return list(itertools.starmap(same, itertools.pairwise(held)))


@pytest.mark.parametrize(("rows_first", "alike"), [(False, [False, True, False]), (True, [True, False])])
def test_a_row_that_overflows_leaves_what_is_held_back_as_it_was(ranks, rows_first, alike):
    """In the first step, too, though rows come before what holds anything back."""
    assert ranks.run(sparse_overflow, 2, rows_first) == [alike] * 2


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=2", "onebit"])
def test_sparse_gradients_travel_as_rows_beside_compressed_ones(ranks, spec):
    answers = ranks.run(sparse_beside, 2, spec)
    for sparse, gradient, expected, records in answers:
        assert sparse
        assert torch.equal(gradient, answers[0][1])
        assert gradient.any(1).nonzero().view(-1).tolist() == [0, 1, 3, 8]
        assert expected is None or torch.allclose(gradient, expected)
        assert len(records) == 1
        assert records[0].record.traffic.payload_bytes == 8 + 3 * (8 + 4 * WIDTH)


def element_bytes_of_rows(rank, world_size, dtype):
    model = gradwire.DistributedDataParallel(nn.Embedding(50, 4, sparse=True, dtype=dtype))
    model(torch.tensor([1, 2])).sum().backward()
    (bucket,) = model.compression.stats().buckets
    return bucket.element_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_count_as_many_bytes_an_element_as_they_have(ranks, dtype):
    assert ranks.run(element_bytes_of_rows, 2, dtype) == [dtype.itemsize] * 2
