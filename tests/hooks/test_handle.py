"""What a user does with a handle: save, load, swap, name."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import average, gradients, wrapped

SHAPES = ((40, 30), (40,), (10, 200), (3,))
LOSSY = ["powersgd:rank=2", "topk:ratio=0.05", "onebit:error_feedback=1"]
WARMED_UP = [f"int4:start_iter={start},warmup=int8" for start in (2, 3, 4)]  # over before a save, at it, after it


def attached(spec, **options):
    ddp = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec, **options)


def steps(ddp, rank, first, last):
    return [average(ddp, gradients(rank, step, SHAPES)) for step in range(first, last)]


def same(left, right):
    """Whether two trees of dicts, lists, tensors and other values are equal in every bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def save_and_load(rank, world_size):
    results = {}
    for spec in [*LOSSY, *WARMED_UP]:
        ddp, handle = attached(spec)
        steps(ddp, rank, 0, 3)
        file = io.BytesIO()
        torch.save(handle.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        again, resumed = attached(spec)
        resumed.load_state_dict(loaded)
        results[spec] = same(loaded, handle.state_dict()), steps(ddp, rank, 3, 6), steps(again, rank, 3, 6)
        handle.close()
        resumed.close()
    return results


def test_a_state_survives_a_file_read_with_weights_only_and_goes_on_in_the_same_bits(ranks):
    for results in ranks.run(save_and_load, 2):
        for spec, (equal, went_on, resumed) in results.items():
            assert equal, spec
            assert same(went_on, resumed), spec


def wrong_states(state, other_rank):
    """{a word that the refusal must hold: a state that does not fit}."""
    missing, reshaped, unknown, unknown_bucket = (copy.deepcopy(state) for _ in range(4))
    del missing["buckets"]
    reshaped["parameters"]["p2"]["residual"] = torch.zeros(7)
    unknown["parameters"]["q9"] = unknown["parameters"]["p0"]
    unknown_bucket["buckets"][0] = ["q8", *unknown_bucket["buckets"][0]]
    return {
        "swap()": {**state, "compressor": "OneBit(block=8)", "spec": "onebit:block=8"},
        "world_size = 64": {**state, "world_size": 64},
        "rank": other_rank,
        "lacks buckets": missing,
        "'p2'": reshaped,
        "q9": unknown,
        "q8": unknown_bucket,
        "gradwire = 99": {**state, "gradwire": 99},
    }


def refuse(rank, world_size):
    refusals = {}
    for spec in ("topk:ratio=0.05", "onebit:error_feedback=1"):
        ddp, handle = attached(spec)
        untouched, _ = attached(spec)
        steps(ddp, rank, 0, 3)
        steps(untouched, rank, 0, 3)
        state, everyone_s = handle.state_dict(), [None] * world_size
        dist.all_gather_object(everyone_s, state)
        for word, wrong in wrong_states(state, everyone_s[1 - rank]).items():
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                handle.load_state_dict(wrong)
            refusals[spec, word] = str(caught.value), same(handle.state_dict(), state)
        handle.load_state_dict({**state, "compressor": "the same, of a version with fewer options"})
        refusals[spec, ""] = "", same(steps(ddp, rank, 3, 5), steps(untouched, rank, 3, 5))
    return refusals


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(ranks):
    for refusals in ranks.run(refuse, 2):
        for (spec, word), (message, unchanged) in refusals.items():
            assert word in message, (spec, word, message)
            assert unchanged, (spec, word)


def swap_through(rank, world_size, specs):
    """What all steps gave; what all averages returned before nothing is held back any more, and after; in float64."""
    ddp, handle = attached(specs[0])
    handle.swap(specs[0])  # before the first step there is nothing to lose
    given = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    got = copy.deepcopy(given)
    for phase, spec in enumerate(specs):
        handle.swap(spec)
        for step in range(3 * phase, 3 * phase + 3):
            numbers = gradients(rank, step, SHAPES)
            torch._foreach_add_(given, [gradient.double() for gradient in numbers])
            torch._foreach_add_(got, [averaged.double() for averaged in average(ddp, numbers).values()])
    before = copy.deepcopy(got)
    torch._foreach_add_(got, list(flushed(ddp, handle).values()))
    handle.close()
    return given, before, got


def saved_between_swap_and_step(rank, world_size):
    """Averages after a swap from a method that holds nothing back, and in a model that loads what was saved then."""
    ddp, handle = attached("topk:ratio=0.1,error_feedback=false")
    steps(ddp, rank, 0, 3)
    handle.swap("onebit")
    again, resumed = attached("onebit")
    resumed.load_state_dict(handle.state_dict())
    results = steps(ddp, rank, 3, 5), steps(again, rank, 3, 5)
    handle.close()
    resumed.close()
    return same(*results)


def test_a_state_that_is_saved_right_after_a_swap_from_what_holds_nothing_back_loads(ranks):
    assert ranks.run(saved_between_swap_and_step, 2) == [True, True]


def swapped_before_the_rebuild(rank, world_size):
    """Whether averages after a swap behind the first step, and after a resume, are alike; by compressor."""
    results = {}
    for spec in ("onebit", "int4", "onebit:residual_bits=8"):
        models = [
            wrapped(SHAPES, find_unused_parameters=False) for _ in range(2)
        ]  # in one bucket, torch's order changes
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


def flushed(ddp, handle):
    """What was held back: the average of zero gradients once nothing compresses."""
    handle.swap("none")
    return average(ddp, [torch.zeros(shape) for shape in SHAPES])


def test_swapping_in_mid_training_loses_nothing_that_was_held_back(ranks):
    answers = ranks.run(swap_through, 3, [*LOSSY, *reversed(LOSSY)])
    for index in range(len(SHAPES)):
        expected = sum(given[index] for given, _, _ in answers) / 3
        for _, before, got in answers:
            assert torch.equal(got[index], answers[0][2][index])
            torch.testing.assert_close(got[index], expected, rtol=0, atol=1e-4)
            assert index % 2 or (before[index] - expected).abs().max() > 1


def swap_around_overflow(rank, world_size):
    results = {}
    for spec in LOSSY:
        flushes = []
        numbers = gradients(rank, 3, SHAPES)
        numbers[1][5] = torch.inf if rank == 1 else 1.0
        for overflow in ("never", "before the swap", "after it"):
            ddp, handle = attached(spec, undo=True)
            steps(ddp, rank, 0, 3)
            if overflow == "before the swap":
                average(ddp, numbers)
            elif overflow == "after it":
                handle.swap("none")
                average(ddp, numbers)
            flushes.append(flushed(ddp, handle))
            handle.close()
        results[spec] = flushes
    return results


def test_an_overflow_just_before_or_after_a_swap_changes_no_bit_of_what_was_held_back(ranks):
    for results in ranks.run(swap_around_overflow, 2):
        for spec, (expected, before, after) in results.items():
            assert same(expected, before), spec
            assert same(expected, after), spec
            assert max(numbers.abs().max() for numbers in expected.values()) > 0.1


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


def loads_with_requires_grad(rank, world_size):
    """Averages after a load of a state whose numbers require gradients, and of the same without."""
    results = {}
    for spec in LOSSY:
        ddp, handle = attached(spec)
        steps(ddp, rank, 0, 3)
        state, found = handle.state_dict(), []
        handle.close()
        for requires in (False, True):
            given = copy.deepcopy(state)
            for numbers in (each for fields in given["parameters"].values() for each in fields.values()):
                numbers.requires_grad_(requires and numbers.is_floating_point())
            again, resumed = attached(spec)
            resumed.load_state_dict(given)
            found.append(steps(again, rank, 3, 5))
            resumed.close()
        results[spec] = same(*found)
    return results


def test_a_state_whose_numbers_require_gradients_loads_as_any_other(ranks):
    for results in ranks.run(loads_with_requires_grad, 2):
        assert all(results.values()), results


def loads_with_other_bits(rank, world_size, bits, others):
    """The largest relative difference of residuals after a state of `bits` was loaded where others are kept."""
    saved, built = None, []
    for each in (bits, others):
        torch.manual_seed(0)
        model = gradwire.DistributedDataParallel(torch.nn.Linear(16, 16), compressor=f"int4:residual_bits={each}")
        for step in range(3):
            model.zero_grad()
            inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().mean().backward()
        built.append(model)
        if saved is None:
            saved = model.compression.state_dict()
        else:
            model.compression.load_state_dict(saved)
    loaded = built[1].compression.state_dict()["parameters"]
    parameters = saved["parameters"].items()
    pairs = [(numbers, loaded[name][field]) for name, fields in parameters for field, numbers in fields.items()]
    return max(float((there - here).double().norm() / there.double().norm().clamp_min(1e-9)) for there, here in pairs)


@pytest.mark.parametrize(("bits", "others"), [(8, 32), (32, 16), (16, 8)])
def test_a_state_loads_where_residuals_have_other_bits(ranks, bits, others):
    for found in ranks.run(loads_with_other_bits, 2, bits, others):
        assert found < (0.02 if others == 8 else 0.01 if others == 16 else 1e-9)


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
