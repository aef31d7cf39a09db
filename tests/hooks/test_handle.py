"""What a user does with a handle: save, load, swap, name."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import SHAPES, attached, same, steps, wrapped


def swapped_before_the_rebuild(rank, world_size):
    """Whether averages after a swap behind the first step, and after a resume, are alike; by compressor."""
    results = {}
    for spec in ("onebit", "int4", "onebit:residual_bits=8"):
        models = [wrapped(SHAPES, find_unused_parameters=False) for _ in "ab"]  # in one bucket, torch's order changes
        handle, resumed = gradwire.attach(models[0], "topk:ratio=0.1"), gradwire.attach(models[1], spec)
        steps(models[0], rank, 0, 1)
        handle.swap(spec)
        steps(models[0], rank, 1, 3)
        resumed.load_state_dict(handle.state_dict())
        results[spec] = same(*(steps(model, rank, 3, 6) for model in models))
        handle.close()
        resumed.close()
    return results


def test_after_a_swap_before_torch_has_rebuilt_its_buckets_a_resumed_training_has_the_same_bits(ranks):
    for results in ranks.run(swapped_before_the_rebuild, 2):
        assert all(results.values()), results


def bind_late(rank, world_size, replacement):
    results = {}
    for spec in ("topk:ratio=0.05", "onebit"):
        named, handle = attached(spec)
        unnamed = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
        numbered = gradwire.Handle(spec)
        unnamed.register_comm_hook(numbered, compress_bucket)
        outputs = [(steps(named, rank, 0, 3), steps(unnamed, rank, 0, 3))]
        names = set(numbered.state_dict()["parameters"])
        if replacement:
            handle.swap(replacement)
            numbered.swap(replacement)
        numbered.bind(unnamed.module)
        states = handle.state_dict(), numbered.state_dict()
        outputs.append((steps(named, rank, 3, 6), steps(unnamed, rank, 3, 6)))
        results[spec] = names, [states, *outputs]
        handle.close()
        numbered.close()
    return results


@pytest.mark.parametrize("replacement", [None, "batched-powersgd"])
def test_a_hook_without_a_model_numbers_parameters_until_bind_names_them_and_changes_no_bit(ranks, replacement):
    for results in ranks.run(bind_late, 2, replacement):
        for names, pairs in results.values():
            assert names == {"0", "1", "2", "3"}
            assert all(same(named, numbered) for named, numbered in pairs)


def loads_with_other_bits(rank, world_size, bits, others):
    """The largest relative difference of residuals after a state of `bits` was loaded where others are kept."""
    handles = []
    for each in (bits, others):
        ddp, handle = attached(f"int4:residual_bits={each}")
        steps(ddp, rank, 0, 3)
        handles.append(handle)
    saved = handles[0].state_dict()
    handles[1].load_state_dict(saved)
    loaded, parameters = handles[1].state_dict()["parameters"], saved["parameters"].items()
    pairs = [(numbers, loaded[name][field]) for name, fields in parameters for field, numbers in fields.items()]
    assert pairs
    return max(float((there - here).double().norm() / there.double().norm().clamp_min(1e-9)) for there, here in pairs)


@pytest.mark.parametrize(("bits", "others"), [(8, 32), (32, 16), (16, 8)])
def test_a_state_loads_where_residuals_have_other_bits(ranks, bits, others):
    for found in ranks.run(loads_with_other_bits, 2, bits, others):
        assert found < (0.02 if others == 8 else 0.01 if others == 16 else 1e-9)


def counted(rank, world_size):
    """Steps by the statistics before a save, after the load and after a step."""
    (ddp, first), (other, second) = attached("topk"), attached("topk")
    steps(ddp, rank, 0, 3)
    second.load_state_dict(first.state_dict())
    counts = [first.stats().steps, second.stats().steps]
    steps(other, rank, 3, 4)
    return [*counts, second.stats().steps]


def test_steps_before_a_checkpoint_count(ranks):
    assert ranks.run(counted, 2) == [[3, 3, 4]] * 2


def moved(rank, world_size):
    """The steps that a handle has counted after three of each DDP that calls its hook."""
    handle, counts = gradwire.Handle("int4"), []
    for wrap in (gradwire.DistributedDataParallel, DDP, gradwire.DistributedDataParallel, DDP):
        model = wrap(nn.Linear(4, 4))
        model.register_comm_hook(handle, compress_bucket)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
        counts.append(handle.stats().steps)
    handle.close()
    return counts


def test_a_handle_that_moves_between_torchs_ddp_and_ours_counts_each_step(ranks):
    assert ranks.run(moved, 2) == [[3, 6, 9, 12]] * 2
