"""Compressors inside DistributedDataParallel: what attaching them to torch's gives, in every bit, and all of the handle."""

import copy

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.compress import compressors

from ..chain import SMALL, WIDTH, Chain, inputs_of, train, wrapped
from ..nets import same

EVERY = [name for name in compressors() if name != "dgc"]  # which takes no parameters that may be unused
FEW = ["none", "bf16", "int8", "powersgd:rank=2", "acp-powersgd", "int4:core=2"]
FEW += ["topk:ratio=0.2", "randomk:ratio=0.2", "batched-powersgd"]
MORE = ["fp16+powersgd:rank=1,start_iter=2", "onebit:block=64", "topk:ratio=0.2,error_feedback=false"]


def compared(rank, world_size, specs, view):
    """For each specification what ours gives, and whether it has the bits of the same one on torch's."""
    results = {}
    for spec in specs:
        steps = range(3 if "start_iter" in spec else 2)
        ours = wrapped(spec, gradient_as_bucket_view=view, find_unused_parameters=True)
        mine = train(ours, rank, steps)
        plan = [bucket.parameters for bucket in ours.compression.stats().buckets]
        ours.compression.close()
        theirs = TorchDDP(Chain(), find_unused_parameters=True, **SMALL)  # keeps its first buckets
        handle = gradwire.attach(theirs, spec)
        expected = train(theirs, rank, steps)
        assert sorted(plan) == sorted(bucket.parameters for bucket in handle.stats().buckets)
        handle.close()
        results[spec] = mine, same(mine, expected)
    return results


@pytest.mark.parametrize(
    ("world_size", "view", "specs"),
    [(2, False, FEW), (3, True, MORE), pytest.param(2, False, EVERY, marks=pytest.mark.thorough)],
    ids=["2 ranks", "3 ranks", "every one"],
)
def test_every_compressor_gives_all_ranks_the_bits_that_it_gives_attached_to_torch_s(ranks, world_size, view, specs):
    answers = ranks.run(compared, world_size, specs, view, timeout=110)
    for results in answers:
        for spec, (mine, as_torch) in results.items():
            assert as_torch, spec
            assert same(mine, answers[0][spec][0]), spec


def in_turn(rank, world_size, specs):
    """Buckets over one group, and over three in turn."""
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    results = {}
    for spec in specs:
        models = [wrapped(spec, process_group=group, bucket_cap_mb=1e-6) for group in (groups[0], groups)]
        results[spec] = [train(model, rank) for model in models]
        engines = len(models[1].compression.averager.engines._made)
    return results, engines


def test_buckets_that_go_over_three_groups_in_turn_are_averaged_as_over_one(ranks):
    for results, engines in ranks.run(in_turn, 2, ["none", "powersgd:rank=2", "topk:ratio=0.2", "onebit"]):
        assert engines == 3
        for one, three in results.values():
            assert same(one, three)


def copied_after_a_swap(rank, world_size):
    """The method in use after a swap, and in a copy."""
    model = wrapped("none")
    train(model, rank, range(1))
    model.compression.swap("bf16")
    twin = copy.deepcopy(model)
    methods = [type(each.compression.compressor).__name__ for each in (model, twin)]
    train(model, rank, range(1, 2))
    return methods


def test_a_swap_outlives_a_copy(ranks):
    assert ranks.run(copied_after_a_swap, 2) == [["BFloat16"] * 2] * 2


def counted(rank, world_size):
    """Payload bytes of each synced step, with a warm-up of two; half of the backwards stay local."""
    model = wrapped("powersgd:rank=1,start_iter=2")
    payloads = []
    for step in range(4):
        with model.no_sync():
            model(inputs_of(rank, step)).sum().backward()
        model(inputs_of(rank, step)).sum().backward()
        payloads.append(model.compression.stats().last.traffic.payload_bytes)
    stats = model.compression.stats()
    return payloads, stats.steps, stats.total.traffic.payload_bytes, [bucket.elements for bucket in stats.buckets]


def test_a_warm_up_counts_synced_steps_and_statistics_count_bytes(ranks):
    dense = 4 * 5 * WIDTH * WIDTH
    for payloads, steps, total, elements in ranks.run(counted, 2):
        assert payloads[:2] == [dense, dense]
        assert payloads[2] == payloads[3] == 4 * 5 * 2 * WIDTH
        assert steps == 4
        assert total == sum(payloads)
        assert sum(elements) == 5 * WIDTH * WIDTH
