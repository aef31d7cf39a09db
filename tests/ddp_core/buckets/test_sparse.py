"""Sparse gradients: the program that averages rows, against the mean of dense tensors."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import simulate
from gradwire.ddp_core.buckets.sparse import no_rows, sparse_mean

ROWS, WIDTH = 9, 3


def gradient(rows, dtype, seed):
    """A sparse gradient with these rows, which may repeat."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), WIDTH, generator=generator, dtype=torch.complex128)
    values = values.to(dtype) if dtype.is_complex else values.real.to(dtype)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (ROWS, WIDTH), check_invariants=True
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize(
    "rows", [[[1, 2], [2, 5]], [[], [3]], [[4], []], [[], []], [[0, 0, 8, 0], [8], [1, 2, 3, 4, 5, 6, 7, 8, 0]], [[2]]]
)
def test_the_mean_of_rows_is_that_of_dense_gradients(dtype, rows):
    given = [gradient(each, dtype, seed) for seed, each in enumerate(rows)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(each.to(wide).to_dense() for each in given) / len(given)
    for mean in simulate([sparse_mean(each, len(given)) for each in given]):
        assert mean.is_sparse
        assert mean.dtype == dtype
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(mean.to_dense().to(wide), expected, rtol=tolerance, atol=tolerance)
        assert mean.coalesce().indices().tolist() == [sorted({row for each in rows for row in each})]


def test_no_rows_is_a_gradient_of_zeros():
    parameter = nn.Parameter(torch.ones(ROWS, WIDTH))
    assert torch.equal(no_rows(parameter).to_dense(), torch.zeros(ROWS, WIDTH))


class Bags(nn.Module):
    """Two tables with sparse gradients, the second one used on request, and a dense layer."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
            self.other = nn.Embedding(ROWS, WIDTH, sparse=True)
            self.layer = nn.Linear(WIDTH, 1)

    def forward(self, tokens, second):
        values = self.bag(tokens)
        return self.layer(values + self.other(tokens[:, 0]) if second else values)


def bags(rank, world_size, skip):
    """The gradients of both tables when the second is used on rank 1 in step 0, nowhere in step 1."""
    model = gradwire.DistributedDataParallel(Bags(), find_unused_parameters=True, skip_all_reduce_unused_params=skip)
    history = []
    for step in range(2):
        model.zero_grad()
        model(torch.tensor([[rank, 2], [2, 5]]), rank == 1 and step == 0).sum().backward()
        gradients = [model.module.bag.weight.grad, model.module.other.weight.grad]
        history.append([None if each is None else each.to_dense() for each in gradients])
    alone = Bags()
    for member in range(world_size):
        (alone(torch.tensor([[member, 2], [2, 5]]), member == 1).sum() / world_size).backward()
    return history, [alone.bag.weight.grad.to_dense(), alone.other.weight.grad.to_dense()]


@pytest.mark.parametrize("skip", [False, True])
def test_sparse_tables_may_be_unused_on_some_ranks_or_all(ranks, skip):
    for history, expected in ranks.run(bags, 2, skip):
        torch.testing.assert_close(history, [expected, [expected[0], None]])
