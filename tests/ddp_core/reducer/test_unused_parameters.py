"""Parameters that some or all ranks leave out of a step."""

import itertools
from contextlib import nullcontext

import pytest
import torch

import gradwire

from ..layers import CAP, DYNAMIC, Layers, expected_average, gradients_of, inputs_of, summed
from ..nets import same

VARIANTS = [
    {"gradient_as_bucket_view": view, "skip_all_reduce_unused_params": skip}
    for view, skip in itertools.product([False, True], repeat=2)
]


def in_all_variants(rank, world_size, function, *args):
    """What a function of (rank, variant, ...) returns, for each variant."""
    return [function(rank, variant, *args) for variant in VARIANTS]


def answers_of(ranks, world_size, function, *args):
    """[(variant, what each rank returned)]."""
    return list(zip(VARIANTS, zip(*ranks.run(in_all_variants, world_size, function, *args), strict=True), strict=True))


def one_step(rank, variant, subsets):
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC, **variant)
    model(inputs_of(rank), subsets[rank]).square().sum().backward()
    return gradients_of(model)


SUBSETS = {
    "other ones on each rank": [(0, 1), (1, 2)],
    "none on one rank": [(0, 1, 2), ()],
    "none on rank 0": [(), (1, 3)],
    "none anywhere": [(), ()],
    "the last layer nowhere": [(0, 1, 2), (0, 1, 2)],
    "the first layer nowhere": [(1, 2, 3), (2, 3)],
}


@pytest.mark.parametrize("subsets", SUBSETS)
def test_a_gradient_is_the_mean_over_ranks_where_any_rank_used_it_and_stays_none_elsewhere(ranks, subsets):
    expected = expected_average(SUBSETS[subsets])
    for variant, answers in answers_of(ranks, 2, one_step, SUBSETS[subsets]):
        assert all(same(gradients, expected) for gradients in answers), variant


def accumulated(rank, variant, compressor, cap):
    """Three synced steps without zero_grad between; the last two leave two layers out everywhere, one on rank 0."""
    options = {**DYNAMIC, **variant, "bucket_cap_mb": cap}
    model = gradwire.DistributedDataParallel(Layers(), compressor=compressor, **options)
    history = []
    for step, used in enumerate([(0, 1, 2, 3), *[(1,) if rank == 0 else (1, 2)] * 2]):
        model(inputs_of(rank, step), used).square().sum().backward()
        history.append(gradients_of(model))
    return history


@pytest.mark.parametrize(("compressor", "cap"), [("none", CAP), ("powersgd:rank=2", None), ("onebit", CAP)])
def test_what_a_parameter_has_gathered_stays_in_every_bit_where_no_rank_uses_it(ranks, compressor, cap):
    added = [expected_average([(1,), (1, 2), (1, 2)], step) for step in (1, 2)]
    for variant, answers in answers_of(ranks, 3, accumulated, compressor, cap):
        for before, *after in answers:
            for grads in after:
                assert same(before[:2] + before[6:], grads[:2] + grads[6:]), variant  # layers 0 and 3
            assert same(after[-1], answers[0][-1]), variant
            if compressor == "none":
                for old, new, *more in zip(before[2:6], after[-1][2:6], *(each[2:6] for each in added), strict=True):
                    torch.testing.assert_close(new, old + sum(more))


def while_accumulating(rank, variant):
    """Layer 0 is used in a micro-batch that is not synced only."""
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC, **variant)
    for micro_batch, used in enumerate([(0, 1), (1, 2)]):
        with model.no_sync() if micro_batch == 0 else nullcontext():
            model(inputs_of(rank, micro_batch), used).square().sum().backward()
    return gradients_of(model)


def test_what_was_used_in_no_sync_alone_is_averaged_with_the_next_synced_backward(ranks):
    parts = [expected_average([used] * 2, step) for step, used in enumerate([(0, 1), (1, 2)])]
    for _, answers in answers_of(ranks, 2, while_accumulating):
        for gradients in answers:
            torch.testing.assert_close(gradients, summed(parts))
