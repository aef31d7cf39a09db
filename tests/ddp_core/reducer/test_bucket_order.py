"""Buckets follow the order in which gradients get ready; what compressors hold back follows the parameters."""

import copy
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradwire
from gradwire.ddp_core.buckets.assignment import BucketAssignment, allocate_own
from gradwire.ddp_core.reducer import bucket_order

from ..errors import message_of
from ..nets import WIDTH

looks_often = mock.patch.object(bucket_order, "INTERVAL", 4)  # at the order, after every fourth step


class Ordered(nn.Module):
    """Four layers, called in the order given: backward brings their gradients in the reverse of it."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(4))

    def forward(self, inputs, order):
        for index in order:
            inputs = self.layers[index](inputs).tanh()
        return inputs


def inputs_of(rank, step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


@looks_often
def orders(rank, world_size, called, hook=None, **options):
    """The order of the buckets in each step, when rank r calls the layers in the order `called[step][r]`."""
    model, seen = gradwire.DistributedDataParallel(Ordered(), bucket_cap_mb=1e-6, **options), []
    if hook:
        model.register_comm_hook(None, hook)
    for step, orders in enumerate(called):
        model(inputs_of(rank, step), orders[rank % len(orders)]).square().sum().backward()
        seen.append([bucket.members[0] for bucket in model.reducer.assignment.buckets])
    return seen


def test_buckets_that_a_graph_writes_to_are_kept_when_others_are_made(monkeypatch):
    capturing, parameters = [False], [torch.ones(2, requires_grad=True) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assignment = BucketAssignment(parameters, [False, False], [8], alias=False, allocate=allocate_own)
    order = bucket_order.BucketOrder(assignment, ["a", "b"], None, torch.device("cuda"))
    written = [weakref.ref(bucket.buffer()) for bucket in assignment.buckets]
    capturing[0] = True
    order.update(64, None, hooked=False, dynamic=False)  # asks nobody for an order
    capturing[0] = False
    order._rebuild([1, 0], allocate_own)
    assert [bucket.members for bucket in assignment.buckets] != [(0,), (1,)]
    assert all(each() is not None for each in written)


def test_a_hook_that_may_know_buckets_by_their_number_sees_them_change_as_often_as_in_torch(ranks):
    called, hook = [(BACK,)] * 3 + [(MIXED,)] * 8, default_hooks.allreduce_hook  # which is not gradwire's
    for seen in ranks.run(orders, 2, called, hook):
        assert seen == [[3, 2, 1, 0]] + [ready(BACK)] * 10
    for seen in ranks.run(orders, 2, called, hook, find_unused_parameters=True):
        assert seen == [[3, 2, 1, 0]] * 11


FORTH, BACK, MIXED = (0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)


def ready(called):
    return list(called[::-1])


def test_buckets_are_rebuilt_once_after_the_first_step_and_again_when_the_order_has_changed_for_good(ranks):
    called = [(BACK,)] * 6 + [(MIXED,)] * 8
    for seen in ranks.run(orders, 2, called):
        assert seen[0] == [3, 2, 1, 0]
        assert seen[1:8] == [ready(BACK)] * 7
        assert seen[8:] == [ready(MIXED)] * 6  # the second look after the change


def test_an_order_that_comes_and_goes_changes_no_bucket(ranks):
    called = [(BACK,)] + [(MIXED,) if step % 2 else (FORTH,) for step in range(12)]
    for seen in ranks.run(orders, 2, called):
        assert seen[1:] == [ready(BACK)] * 12


def test_where_ranks_see_different_orders_rank_0_decides(ranks):
    called = [(MIXED, BACK, FORTH)] * 3
    for seen in ranks.run(orders, 3, called):
        assert seen[1:] == [ready(MIXED)] * 2


class Given(nn.Module):
    """Parameters whose gradients are given; they get ready in the order given, last one first."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(8, 6)) for _ in range(6))

    def forward(self, gradients, order):
        total = torch.zeros(())
        for index in order:
            total = total + (self.parts[index] * gradients[index]).sum()
        return total


@looks_often
def conserved(rank, world_size, spec):
    """Mean over ranks of all that was given, and all that came back, when buckets are rebuilt three times."""
    model = gradwire.DistributedDataParallel(Given(), bucket_cap_mb=3 * 192 / 2**20, compressor=spec)
    generator = torch.Generator().manual_seed(rank)
    called = [(0, 2, 4, 1, 3, 5)] * 4 + [(5, 1, 0, 4, 2, 3)] * 5 + [(3, 2, 5, 4, 1, 0)] * 8
    given, got, assigned = torch.zeros(6, 8, 6), torch.zeros(6, 8, 6), []
    for step, order in enumerate([*called, called[-1]]):
        gradients = torch.randn(6, 8, 6, generator=generator)
        if step == len(called):
            model.compression.swap("none")
            gradients.zero_()
        model(gradients, order).backward()
        given += gradients
        got += torch.stack([part.grad for part in model.module.parts])
        assigned.append(tuple(sorted(tuple(sorted(bucket.members)) for bucket in model.reducer.assignment.buckets)))
        model.zero_grad()
    dist.all_reduce(given)
    return given / world_size, got, len(set(assigned))


@pytest.mark.parametrize(
    "spec", ["powersgd:rank=1", "topk:ratio=0.1", "onebit:error_feedback=1", "batched-powersgd:rank=1"]
)
def test_nothing_held_back_is_lost_when_buckets_are_rebuilt(ranks, spec):
    answers = ranks.run(conserved, 2, spec)
    for given, got, assigned in answers:
        assert assigned == 4
        torch.testing.assert_close(got, given, rtol=0, atol=2e-4)
    assert torch.equal(answers[0][1], answers[1][1])


def loaded_in_other_sizes(rank, world_size):
    """Whether training goes on where a state went through a model with smaller buckets, and its buckets stay the same."""
    state, answers = None, []
    for megabytes in (25.0, 1e-6, 1e-6):
        model = gradwire.DistributedDataParallel(Ordered(), bucket_cap_mb=megabytes, compressor="topk:ratio=0.5")
        if state is not None:
            model.compression.load_state_dict(state)
        for step in range(3):
            model(inputs_of(rank, step), BACK).square().sum().backward()
            answers.append([bucket.members for bucket in model.reducer.assignment.buckets])
            model.zero_grad()
        state = copy.deepcopy(model.compression.state_dict())
        names = [name for bucket in state["buckets"] for name in bucket]
        assert len(names) == len(set(names)) == 4
    return answers


def test_a_state_may_go_through_models_with_other_sizes_of_buckets(ranks):
    for answers in ranks.run(loaded_in_other_sizes, 2):
        assert answers[:3] == [[(3, 2, 1, 0)]] + [[(0, 1, 2, 3)]] * 2
        assert answers[3:] == [[(0,), (1,), (2,), (3,)]] * 6


@looks_often
def changed_at_a_look(rank, world_size, change, at, who):
    """What is raised where some ranks swap or load right before the step at which all look at the order."""
    model = gradwire.DistributedDataParallel(
        Ordered(), bucket_cap_mb=1e-6, compressor="topk", timeout=timedelta(seconds=20)
    )
    other = gradwire.DistributedDataParallel(Ordered(), bucket_cap_mb=1e-6, compressor="topk")
    for step in range(3):
        other(inputs_of(rank, step), BACK).square().sum().backward()
    saved, told = other.compression.state_dict(), []
    for step in range(at):
        model(inputs_of(rank, step), MIXED).square().sum().backward()
    if rank in who:
        model.compression.swap("none") if change == "swap" else model.compression.load_state_dict(saved)
    for _ in range(2):
        try:
            model(inputs_of(rank, at), MIXED).square().sum().backward()
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("who", [(0,), (1, 2)])
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("change", ["load", "swap"])
def test_a_change_on_some_ranks_only_right_at_a_look_is_an_error_on_all(ranks, change, at, who):
    others = [rank for rank in range(3) if rank not in who]
    some = f"before step {at + 1} since the start ranks {list(who)} have swapped the compressor or loaded a state"
    for told in ranks.run(changed_at_a_look, 3, change, at, who):
        assert len(told) == 2
        assert all(f"{some}, and ranks {others} have not" in each for each in told)


@looks_often
def resumed_under_another_order(rank, world_size):
    """The buckets of steps after a resume, the first of which is not like those before the checkpoint."""
    first, second = (
        gradwire.DistributedDataParallel(Ordered(), bucket_cap_mb=1e-6, compressor="topk") for _ in range(2)
    )
    for step in range(2):
        first(inputs_of(rank, step), BACK).square().sum().backward()
    second.compression.load_state_dict(first.compression.state_dict())
    seen = []
    for step, order in enumerate([MIXED, BACK, BACK]):
        second(inputs_of(rank, step), order).square().sum().backward()
        seen.append([bucket.members[0] for bucket in second.reducer.assignment.buckets])
    return seen


def test_the_first_step_after_a_resume_does_not_decide_the_order(ranks):
    assert ranks.run(resumed_under_another_order, 2) == [[ready(BACK)] * 3] * 2


def breaks_off(rank, world_size):
    """What two forwards raise where new buckets find no memory."""
    model = gradwire.DistributedDataParallel(Ordered(), bucket_cap_mb=1e-6)
    model(inputs_of(rank, 0), (3, 2, 1, 0)).square().sum().backward()
    model._order.drain = lambda: 1 / 0
    return [message_of(model, inputs_of(rank, 1), (3, 2, 1, 0)) for _ in range(2)]


def test_a_rank_whose_new_buckets_broke_off_goes_on_with_no_others(ranks):
    for first, then in ranks.run(breaks_off, 2):
        assert first == "ZeroDivisionError: division by zero"
        assert "making the buckets anew broke off" in then


@looks_often
def one_evaluates(rank, world_size, who):
    """Whether all ranks have rank 0's weights after steps between which one rank alone runs forwards without gradients."""
    torch.manual_seed(5)
    model = gradwire.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model.train()(inputs_of(rank, step).float()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == who and step < 8:  # the forward of the others that copies buffers is still to come
            with torch.no_grad():
                model.eval()(inputs_of(rank, 0).float())
                model(inputs_of(rank, 1).float())
    weight = next(model.parameters()).detach().clone()
    theirs = weight.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(weight, theirs)


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_may_evaluate_alone_right_before_a_look(ranks, who):
    assert ranks.run(one_evaluates, 2, who) == [True, True]
