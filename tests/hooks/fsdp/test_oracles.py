"""FSDP2 with gradwire's communication: against torch's own, and against what formulas say of every payload."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire

from .given import SHAPES, Shows, given_model, gradients, mean_gradients, mesh_of, network, trained, whole

STEPS = 4


def quantized(values, bits, sizes):
    """Blocks of 128, anew in each part of these sizes: the nearest multiple of a scale; written out anew, in float32.

    Of 16 bits: bfloat16.
    """
    if bits == 16:
        return values.bfloat16().float()
    steps, largest_code = {8: (127.0, 127), 4: (8.0, 7)}[bits]
    found = []
    for block in (block for part in values.split(sizes) for block in part.split(128)):
        largest = block.abs().max()
        codes = (block / largest * steps).round().clamp(-largest_code, largest_code) if largest > 0 else block
        found.append(codes * (largest / steps))
    return torch.cat(found)


def sizes_of(parts, world_size):
    """Elements of a shard of each part, with its padding."""
    return [-(-part.shape[0] // world_size) * part[:1].numel() for part in parts]


def rows_of(parts, world_size):
    """(ranks, row): of each part its shards along the first axis, padded with zeros."""
    columns = []
    for part in parts:
        size = -(-part.shape[0] // world_size)
        padded = torch.zeros(size * world_size, *part.shape[1:])
        padded[: part.shape[0]] = part
        columns.append(padded.reshape(world_size, -1))
    return torch.cat(columns, 1)


def expected_means(world_size, bits, feedback):
    """The rows of mean gradients of each module, step by step, and what each rank holds back in the end."""
    held = [[torch.zeros_like(rows_of(part, world_size)) for part in gradients(0, 0)] for _ in range(world_size)]
    steps = []
    for step in range(STEPS):
        means = []
        for module in range(len(SHAPES)):
            total = 0
            for rank in range(world_size):
                rows = rows_of(gradients(rank, step)[module], world_size) + held[rank][module]
                sizes = sizes_of(gradients(rank, step)[module], world_size)
                sent = torch.stack([quantized(row, bits, sizes) for row in rows])
                held[rank][module] = rows - sent if feedback else torch.zeros_like(rows)
                total = total + sent
            means.append(total / world_size)
        steps.append(means)
    return steps, held


def averaged(rank, world_size, spec):
    model = given_model(world_size)
    handle = gradwire.attach(model, gather="int8", reduce=spec)
    means = [mean_gradients(model, gradients(rank, step)) for step in range(STEPS)]
    state = handle.state_dict()[f"rank {rank} of {world_size}"]
    handle.close()
    return means, state


def by_module(named):
    """The values of {name: value} as lists by module, in the order of the parameters."""
    return [
        [named[f"parts.{module}.p{place}"] for place in range(len(SHAPES[module]))] for module in range(len(SHAPES))
    ]


@pytest.mark.parametrize(
    ("spec", "bits", "world_size"),
    [("int8:error_feedback=true", 8, 2), ("int4", 4, 3), ("int4:error_feedback=false", 4, 2), ("bf16", 16, 3)],
)
def test_quantized_gradients_are_the_sums_of_what_each_rank_sends(ranks, world_size, spec, bits):
    feedback = "false" not in spec and bits < 16
    expected, held = expected_means(world_size, bits, feedback)
    for rank, (means, state) in enumerate(ranks.run(averaged, world_size, spec)):
        for mean, rows in zip(means, expected, strict=True):
            for parts, row in zip(by_module(mean), rows, strict=True):
                torch.testing.assert_close(rows_of(parts, world_size), row, rtol=1e-5, atol=1e-6)
        assert state["step"] == STEPS
        if not feedback:
            assert state["parameters"] == {}
            continue
        residuals = {name: fields["residual"] for name, fields in state["parameters"].items()}
        for parts, rows in zip(by_module(residuals), held[rank], strict=True):
            torch.testing.assert_close(rows_of(parts, world_size), rows, rtol=1e-4, atol=1e-5)


def weights(rank, world_size, spec, options):
    """The weights in forward, and the exact ones, before and after an optimizer step."""
    torch.manual_seed(1)
    model = Shows()
    first = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model, mesh=mesh_of(world_size), **options)
    handle = gradwire.attach(model, gather=spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1)).backward()
    seen, kept = model.in_forward[0], list(whole(model).values())
    optimizer.step()
    handle.close()
    return first, seen, kept


@pytest.mark.parametrize(("spec", "bits"), [("int8", 8), ("int4:send=weights", 4), ("bf16", 16)])
@pytest.mark.parametrize("half", [False, True])
def test_all_ranks_compute_with_the_same_quantized_weights_and_keep_the_exact_ones(ranks, spec, bits, half):
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if half else {}
    answers = ranks.run(weights, 3, spec, options)
    for first, seen, kept in answers:
        assert all(map(torch.equal, kept, first))
        assert all(map(torch.equal, seen, answers[0][1]))
        rounded = [each.bfloat16().float() if half else each for each in first]
        rows = torch.stack([quantized(row, bits, sizes_of(rounded, 3)) for row in rows_of(rounded, 3)])
        torch.testing.assert_close(rows_of(seen, 3), rows, rtol=1e-2 if half else 1e-6, atol=1e-6)


def validated(rank, world_size, **options):
    """Bytes of a step of training before and after much evaluation, and those of all."""
    model = network(world_size)
    handle = gradwire.attach(model, **options)
    trained(model, rank, steps=2)
    before = handle.metrics()
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            model(torch.zeros(1, 7))
    model.train()
    trained(model, rank, steps=1)
    after = handle.metrics()
    handle.close()
    return before, after


@pytest.mark.parametrize("options", [{}, {"gather": "int8"}])
def test_what_an_evaluation_gathers_is_in_no_step_but_in_all(ranks, options):
    for before, after in ranks.run(validated, 2, **options):
        assert after["sent_bytes"] <= before["sent_bytes"]  # the root may be gathered still
        assert after["rounds"] <= before["rounds"]
        assert after["total_sent_bytes"] > before["total_sent_bytes"] + after["sent_bytes"]
