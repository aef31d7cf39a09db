"""Our DistributedDataParallel against torch's, bit for bit, and against one process that trains on all batches."""

import random

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ...torch_versions import needs_torch
from .. import nets
from ..nets import Net, Settings, close, same
from ..training import train, train_alone

pytestmark = needs_torch("2.15", "its DDP knows no bucket_cap_mb_list, and Gloo broadcasts no complex numbers")

CASES_A_CHUNK = 4


def drawn(seed):
    """A random model's parts and the settings of its training, which torch can do, too."""
    source = random.Random(seed)
    parts = tuple(source.choices(nets.PARTS, k=source.randint(1, 5)))
    sizes = {"small": {"bucket_cap_mb": 0.0005}, "list": {"bucket_cap_mb_list": [0.0002, 0.001]}, "default": {}}
    options = {"gradient_as_bucket_view": source.random() < 0.5, **sizes[source.choice(sorted(sizes))]}
    micro_batches = source.choice([1, 1, 2, 3])
    if nets.Conditional in parts or (nets.Unused in parts and source.random() < 0.5):
        options["find_unused_parameters"] = True
    elif nets.Unused in parts or source.random() < 0.3:
        options["static_graph"] = True
        micro_batches = 1
    elif source.random() < 0.3:
        options["find_unused_parameters"] = True
    skip, set_to_none = source.random() < 0.5, nets.SparseRows in parts or source.random() < 0.6
    return parts, Settings(options, skip, micro_batches, set_to_none)


def drawn_for_one_bucket(seed):
    """As much as leaves the order of additions on three ranks to the order of parameters in the bucket alone."""
    source = random.Random(seed)
    parts = [part for part in nets.ALWAYS if part is not nets.SparseRows]
    options = {"gradient_as_bucket_view": source.random() < 0.5}
    return tuple(source.choices(parts, k=source.randint(1, 5))), Settings(options, False, source.choice([1, 1, 2, 3]))


def compare(rank, world_size, seeds, draw, zeros=0):
    failures = []
    for seed in seeds:
        parts, settings = draw(seed)
        described = f"seed {seed}: {[part.__name__ for part in parts]}, {settings}"
        more = {"skip_all_reduce_unused_params": settings.skip}
        ours = gradwire.DistributedDataParallel(Net(parts, seed), **settings.options, **more)
        theirs = TorchDDP(Net(parts, seed), **settings.options)
        mine, my_gradients = train(ours, rank, settings, zeros)
        expected, gradients = train(theirs, rank, settings, zeros)
        if not same(mine, expected) or not same(densified(my_gradients), densified(gradients)):
            failures.append(f"{described}: not torch's bits")
        alone = train_alone(Net(parts, seed), world_size, settings)
        if not close(mine, alone, 1e-5 if nets.Single in parts else 1e-12):
            failures.append(f"{described}: not what one process computes")
    return failures


def densified(gradients):
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in gradients]


@pytest.mark.parametrize("chunk", range(3))
def test_on_two_ranks_training_has_the_bits_of_torch_s_and_is_that_of_one_process(ranks, chunk):
    seeds = range(chunk * CASES_A_CHUNK, (chunk + 1) * CASES_A_CHUNK)
    assert ranks.run(compare, 2, seeds, drawn) == [[], []]


def test_on_three_ranks_with_one_bucket_training_has_the_bits_of_torch_s(ranks):
    assert ranks.run(compare, 3, range(100, 104), drawn_for_one_bucket, zeros=1) == [[], [], []]
