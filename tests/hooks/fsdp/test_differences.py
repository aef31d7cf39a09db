"""Differences of weights: against an account by hand; forward and backward alike; saved, resumed, on other ranks; mended."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire

from ..given import same, through_file
from .given import Shows, mesh_of, network, trained, whole
from .test_oracles import quantized, rows_of, sizes_of


def shown(rank, world_size, spec, options, steps=5, forwards=1):
    """The exact weights before each step, and those that were computed with."""
    torch.manual_seed(1)
    inner = Shows()
    model = nn.Sequential(inner)
    for part in (inner, model):
        fully_shard(part, mesh=mesh_of(world_size), **options)
    handle = gradwire.attach(model, gather=spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    exact = []
    for step in range(steps):
        exact.append(list(whole(model).values()))
        loss = sum(model(torch.full((1,), 0.1 * (step + rank + times + 1))) for times in range(forwards))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return exact, inner.in_forward, inner.in_backward


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("spec", "bits"), [("int4", 4), ("int8:send=differences", 8)])
def test_weights_in_use_follow_the_exact_ones_by_encoded_differences(ranks, spec, bits, half):
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if half else {}
    answers = ranks.run(shown, 3, spec, options)
    for exact, forward, _ in answers:
        in_use = None
        for step, (now, seen) in enumerate(zip(exact, forward, strict=True)):
            rows = rows_of([each.bfloat16().float() if half else each for each in now], 3)
            sizes = sizes_of(now, 3)
            sent = 0 if in_use is None else torch.stack([quantized(row, bits, sizes) for row in rows - in_use])
            in_use = rows if in_use is None else in_use + sent
            in_use = in_use.bfloat16().float() if half else in_use
            tolerance = 1e-2 if half else 1e-6
            torch.testing.assert_close(rows_of(seen, 3), in_use, rtol=tolerance, atol=tolerance)
            assert all(map(torch.equal, seen, answers[0][1][step]))  # on all ranks, owners too
            in_use = rows_of(seen, 3)  # an account of each step by itself: sums differ in their last bits
    assert any(not torch.equal(*pair) for pair in zip(answers[0][0][-1], answers[0][1][-1], strict=True))


@pytest.mark.parametrize("spec", ["int4", "int2"])
def test_all_forwards_and_backwards_of_a_step_have_the_same_weights(ranks, spec):
    for _, forward, backward in ranks.run(shown, 2, spec, {}, 3, 2):
        for step in range(3):
            first, *others = forward[2 * step : 2 * step + 2] + backward[2 * step : 2 * step + 2]
            assert len(others) == 3
            assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def evaluated(rank, world_size, spec, mode):
    """The exact weights after steps, between them saves, and evaluations in a mode or none; and rounds of the last step."""
    model = network(world_size)
    handle = gradwire.attach(model, gather=spec, reduce="int4")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(4):
        trained(model, rank, 1, step, optimizer)
        handle.state_dict()
        for _ in range(2 if mode else 0):
            with mode():
                model.eval()(torch.ones(3, 7))
            model.train()
    rounds = handle.stats().last.traffic.rounds
    model.reshard()
    handle.close()
    return whole(model), rounds


@pytest.mark.parametrize("spec", ["int4", "int8"])
def test_an_evaluation_also_in_inference_mode_changes_no_bit_of_training_and_backward_gathers_nothing(ranks, spec):
    quiet, *others = (ranks.run(evaluated, 2, spec, mode) for mode in (None, torch.no_grad, torch.inference_mode))
    for rank, (expected, rounds) in enumerate(quiet):
        assert all(same(other[rank][0], expected) for other in others)
        assert rounds == 3 + 3 or spec == "int8"  # modules in forward, and their gradients


def state_of(inside):
    return {(name, field): each for name, fields in inside["weights"].items() for field, each in fields.items()}


def resumed(rank, world_size, spec, folder):
    """Whether steps after a resume are as without one, to the bit."""
    models = [network(world_size) for _ in range(2)]
    handles = [gradwire.attach(model, gather=spec, reduce="int4") for model in models]
    trained(models[0], rank, 3)
    state, fresh = handles[0].state_dict(), handles[1].state_dict()
    key = f"rank {rank} of {world_size}"
    assert state_of(state[key]).keys() == state_of(fresh[key]).keys() != set()
    if folder:
        dcp.save({"compression": state}, checkpoint_id=folder)
        dcp.load({"compression": fresh}, checkpoint_id=folder)
    else:
        fresh = through_file(state)
    with torch.no_grad():
        for own, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            own.to_local().copy_(theirs.to_local())
    handles[1].load_state_dict(fresh)
    before = same(*(state_of(handle.state_dict()[key]) for handle in handles))
    after = [trained(model, rank, 3, 3) for model in models]
    more = trained(models[1], rank, 1, 6)
    for handle in handles:
        handle.close()
    return [before, same(*after), not same(after[0], more)]


@pytest.mark.parametrize(("spec", "through_a_folder"), [("int4", False), ("int2", True), ("onebit", False)])
def test_a_training_goes_on_to_the_bit(ranks, spec, through_a_folder, tmp_path):
    folder = str(tmp_path) if through_a_folder else None
    assert ranks.run(resumed, 3, spec, folder) == [[True] * 3] * 3


def saved(rank, world_size):
    model = network(world_size)
    handle = gradwire.attach(model, gather="int4", reduce="int4")
    trained(model, rank, 3)
    return handle.state_dict()


def resized(rank, world_size, states):
    """Whether the first weights in use after a load of other ranks' states are exact; the weights after steps."""
    model = network(world_size)
    handle = gradwire.attach(model, gather="int4", reduce="int4")
    handle.load_state_dict(states, resize=True)
    model(torch.ones(2, 7))
    in_use = state_of_newest(handle)
    found = [torch.equal(in_use[name][: len(shard)], shard) for name, shard in shards_of(model).items()]
    after = trained(model, rank, 2)
    handle.close()
    return found, after


def state_of_newest(handle):
    """The weights in use of all modules, those of a step under way too."""
    found = {}
    for held in handle.averager.in_use._held.values():
        found |= held.own._shards(held.own.flat[: held.own.layout.row])
    return found


def shards_of(model):
    model.reshard()  # the root stays gathered otherwise
    return {name: each.detach().to_local() for name, each in model.named_parameters()}


def test_on_another_number_of_ranks_the_next_weights_are_exact(ranks):
    states = ranks.run(saved, 3)
    for found, after in ranks.run(resized, 2, states):
        assert all(found)
        assert all(each.isfinite().all() for each in after.values())


def saved_by_a_thread(rank, world_size):
    """Whether a state that a thread takes in the middle of a forward is that after the step before."""
    model = network(world_size)
    handle = gradwire.attach(model, gather="int4", reduce="int4")
    found = []

    def save(*_):
        thread = threading.Thread(target=lambda: found.append(handle.state_dict()))
        thread.start()
        thread.join()

    after = []
    model[2].register_forward_hook(save)
    for step in range(3):
        trained(model, rank, 1, step)
        after.append(handle.state_dict())
    key = f"rank {rank} of {world_size}"
    handle.close()
    return [same(*(state_of(each[key]) for each in pair)) for pair in zip(found[1:], after, strict=False)]


def test_a_thread_that_saves_in_a_forward_gets_the_weights_in_use_of_the_step_before(ranks):
    assert ranks.run(saved_by_a_thread, 2) == [[True, True]] * 2


def swapped(rank, world_size):
    """What weights in use lack, before a swap, after one to differences anew, and to weights themselves."""
    model = network(world_size)
    handle = gradwire.attach(model, gather="int2")
    found = []
    for spec in (None, "int4", "int8"):
        trained(model, rank, 2)
        if spec:
            handle.swap(gather=spec)
        model(torch.ones(2, 7))
        in_use = state_of_newest(handle)
        shards = shards_of(model)
        found.append([(in_use[n][: len(s)] - s).abs().max().item() for n, s in shards.items() if n in in_use])
    handle.close()
    return found


def test_after_a_swap_the_weights_in_use_are_exact_or_not_held(ranks):
    for before, after, themselves in ranks.run(swapped, 2):
        assert max(before) > 0
        assert max(after) == 0
        assert themselves == []


def broken(rank, world_size):
    """Outputs of all ranks: of weights, of weights with one that is not finite, and after it was mended."""
    model = network(world_size)
    handle = gradwire.attach(model, gather="int4")
    inputs, outputs = torch.ones(2, 7), []
    kept = [each.to_local().clone() for each in model.parameters()]
    for bad in (None, torch.nan, None, torch.inf, None):
        with torch.no_grad():
            shards = list(shards_of(model).values())
            for shard, numbers in zip(shards, kept, strict=True):
                shard.copy_(numbers)
            if bad is not None and rank == 1:
                shards[0][0, 0] = bad
            outputs.append(model(inputs))
            for _ in range(6 if bad is None else 0):
                for shard in shards_of(model).values():
                    shard.add_(1e-6)  # so that differences go on
                outputs[-1] = model(inputs)
    handle.close()
    return outputs


def test_what_is_not_finite_shows_on_all_ranks_and_goes_when_the_weights_are_mended(ranks):
    for outputs in ranks.run(broken, 2):
        assert [bool(each.isfinite().all()) for each in outputs] == [True, False, True, False, True]
        for mended in outputs[2::2]:
            torch.testing.assert_close(mended, outputs[0], rtol=1e-3, atol=1e-3)


def evaluated_with_others(rank, world_size, spec, evaluates):
    """What evaluations get of weights that were swapped in, and without differences; and the exact weights afterwards."""
    found, models = [], [network(world_size) for _ in range(2)]
    handles = [gradwire.attach(model, gather=each) for model, each in zip(models, (spec, "none"), strict=True)]
    for round_ in range(3):
        outputs = []
        for model in models:
            trained(model, rank, 2, 2 * round_, torch.optim.SGD(model.parameters(), lr=1e-3))
            kept = {name: shard.clone() for name, shard in shards_of(model).items()}
            generator = torch.Generator().manual_seed(round_)
            for shard in shards_of(model).values():
                shard.copy_(torch.rand(shard.shape, generator=generator) - 0.5)
            outputs.append([evaluates(model).clone() for _ in range(2)])
            for name, shard in shards_of(model).items():
                shard.copy_(kept[name])
        found.append(all(map(torch.equal, *outputs)))
    after = [whole(model) for model in models]
    for handle in handles:
        handle.close()
    return found, after


def without_gradients(model):
    with torch.no_grad():
        return model(torch.ones(2, 7))


def in_evaluation_mode(model):
    outputs = model.eval()(torch.ones(2, 7)).detach()
    model.train()
    return outputs


def gathered_by_hand(model):
    with torch.no_grad():
        for part in (model[0], model[2], model):
            part.unshard()
        return model(torch.ones(2, 7))


@pytest.mark.parametrize(
    ("spec", "evaluates"),
    [("int4", without_gradients), ("int2", in_evaluation_mode), ("int4", gathered_by_hand)],
    ids=["int4", "int2", "by hand"],
)
def test_weights_that_were_swapped_in_are_evaluated_as_they_are(ranks, spec, evaluates):
    for found, (ours, exact) in ranks.run(evaluated_with_others, 2, spec, evaluates):
        assert found == [True] * 3
        torch.testing.assert_close(ours, exact, rtol=1e-2, atol=1e-2)


WRONG = [
    ("int4:send=deltas", "send is weights or differences"),
    ("none:send=differences", "leave send out"),
    ({"name": "int4", "send": 3}, "send is weights or differences"),
    ("int4:rounding=stochastic", "to the nearest"),
]


@pytest.mark.parametrize(("spec", "words"), WRONG)
def test_what_is_refused_says_what_to_do(spec, words):
    with pytest.raises(ValueError, match=words):
        gradwire.compress.shards.weights.weight_gather(spec)
