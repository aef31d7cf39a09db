"""FSDP2 on two emulated hosts of two ranks: sums inside hosts first, by hand; saved, resumed, resized, swapped."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import gradwire

from ...compress.shards.test_hosts import ByHand
from ...ddp_core.errors import message_of
from ..given import same
from .given import given_model, gradients, mean_gradients, mesh_of, network, trained
from .test_oracles import by_module, rows_of, sizes_of
from .test_state import steps

RANKS, STEPS = 4, 3
HOSTS = "hosts:ranks=2+int4"
BY_HAND = [("hosts:ranks=2+int4", None), ("hosts:ranks=2,inside=int8+int4", 8)]


def residuals(state):
    (inside,) = state.values()
    return {name: fields["residual"] for name, fields in inside["parameters"].items()}


def averaged(rank, world_size, spec):
    """The means of given gradients and what is held back; bytes between hosts and inside of them."""
    model = given_model(world_size)
    handle = gradwire.attach(model, gather="hosts:ranks=2+int8", reduce=spec)
    means = steps(model, rank, 0, STEPS)
    held, last = residuals(handle.state_dict()), handle.stats().last.traffic
    handle.close()
    return means, held, last


@pytest.mark.parametrize(("spec", "inside"), BY_HAND)
def test_gradients_are_the_sums_of_hosts_as_each_sends_them(ranks, spec, inside):
    by_hand = [ByHand(RANKS, 2, 4, inside, sizes_of(parts, RANKS)) for parts in gradients(0, 0)]
    answers = ranks.run(averaged, RANKS, spec)
    for step in range(STEPS):
        for module, account in enumerate(by_hand):
            expected = account.step([rows_of(gradients(rank, step)[module], RANKS) for rank in range(RANKS)])
            for means, _, _ in answers:
                mean = rows_of(by_module(means[step])[module], RANKS)
                torch.testing.assert_close(mean.view(-1), expected, rtol=1e-5, atol=1e-6)
    for rank, (_, held, last) in enumerate(answers):
        for module, account in enumerate(by_hand):
            for owner, row in enumerate(rows_of(by_module(held)[module], RANKS)):
                expected = account.held.get((rank, owner), torch.zeros_like(row))
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
        assert 0 < last.sent_bytes < last.host_bytes


def both_ways(rank, world_size):
    """Parameters after the same training without hosts and with them."""
    found = []
    for gather in ("int4", HOSTS):
        model = network(world_size, reshard_after_forward=2 if gather == HOSTS else True)
        handle = gradwire.attach(model, gather=gather)
        found.append(trained(model, rank, steps=3))
        handle.close()
    return found


def test_training_with_weights_in_two_levels_has_the_same_bits(ranks):
    for one_level, two_levels in ranks.run(both_ways, RANKS):
        assert all(torch.equal(one_level[name], two_levels[name]) for name in one_level)


def attached(world_size, reduce=HOSTS):
    model = given_model(world_size)
    return model, gradwire.attach(model, gather="hosts:ranks=2+int8", reduce=reduce)


def saved(rank, world_size):
    model, handle = attached(world_size)
    steps(model, rank, 0, 2)
    state = handle.state_dict()
    after = steps(model, rank, 2, 4)
    handle.close()
    return state, after


def resumed(rank, world_size, saves):
    """Whether a resume goes on to the bit; residuals of the mean of all; the same in one level; errors of swaps."""
    model, handle = attached(world_size)
    handle.load_state_dict(saves[rank][0])
    alike = same(steps(model, rank, 2, 4), saves[rank][1])
    handle.load_state_dict([state for state, _ in saves], resize=True)
    held = residuals(handle.state_dict())
    handle.swap(reduce="int4")  # what is held back of some rows is so of a whole gradient
    swapped = residuals(handle.state_dict())
    steps(model, rank, 4, 5)
    message = message_of(handle.swap, reduce=HOSTS)
    handle.swap(reduce="none")
    steps(model, rank, 5, 6)
    handle.swap(reduce=HOSTS)
    steps(model, rank, 6, 7)
    wrong = message_of(handle.load_state_dict, saves[rank ^ 1][0])
    handle.close()
    return alike, held, swapped, message, wrong


def test_two_levels_are_saved_resumed_resized_and_swapped_and_nothing_is_lost(ranks):
    saves = ranks.run(saved, RANKS)
    whole = [residuals(state) for state, _ in saves]
    answers = ranks.run(resumed, RANKS, saves)
    for name in whole[0]:
        owed = sum(each[name] for each in whole) / RANKS
        torch.testing.assert_close(sum(held[name] for _, held, *_ in answers) / RANKS, owed)
    for alike, held, swapped, message, wrong in answers:
        assert alike
        assert all(torch.equal(held[name], swapped[name]) for name in held)
        assert "swap(reduce='none') one step earlier" in message
        assert "load each rank's own" in wrong


def secondary(rank, world_size):
    """The scopes of each program's rounds in a step whose backward gathers from shards of the host."""
    model = network(world_size, reshard_after_forward=2)
    handle = gradwire.attach(model, gather="hosts:ranks=2+int8", reduce="hosts:ranks=2+int4")
    trained(model, rank, steps=2)
    records = [each.record for each in handle.stats().buckets]
    handle.close()
    return [[scope for scope, _, _ in each.requests] for each in records]


def test_backward_gathers_shards_of_the_host_inside_of_it(ranks):
    for records in ranks.run(secondary, RANKS):
        assert sorted(records) == sorted(3 * [["host"], ["across", "host"], ["host", "across"]])


def refused(rank, world_size):
    """What hosts of three of four ranks raise, and one host, which needs no second level."""
    model = fully_shard(torch.nn.Linear(3, 3), mesh=mesh_of(world_size))
    gradwire.attach(model, gather="hosts:ranks=4+int8", reduce="hosts:ranks=2+int8").close()
    return message_of(gradwire.attach, model, reduce="hosts:ranks=3+int8")


def test_hosts_that_do_not_divide_the_ranks_are_refused(ranks):
    assert all("does not divide" in message for message in ranks.run(refused, RANKS))


def found(rank, world_size):
    """Means where all ranks are found to be on one host: exact."""
    model = given_model(world_size)
    handle = gradwire.attach(model, gather="hosts+int8", reduce="hosts+int4")
    means = mean_gradients(model, gradients(rank, 0))
    handle.close()
    return means


def test_hosts_are_found_and_one_alone_sums_exactly(ranks):
    first, second = ([each for part in gradients(rank, 0) for each in part] for rank in range(2))
    for means in ranks.run(found, 2):
        for mean, one, other in zip(means.values(), first, second, strict=True):
            torch.testing.assert_close(mean, (one + other) / 2)
