"""Every way of setting up DDP that changes what a hook is handed."""

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

from ..torch_versions import complex_numbers
from .training import TINY_BUCKETS, Case, backward, batch, same, train

SPECS = ["none", "bf16", "powersgd:rank=2", "topk:ratio=0.1", "onebit:error_feedback=1"]


def network():
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))


def frozen():
    net = network()
    net[0].weight.requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.back = nn.Linear(12, 20), nn.Linear(12, 20)
        self.back.weight = self.into.weight

    def forward(self, inputs):
        return self.back((self.into(inputs).relu() @ self.into.weight).relu())


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(12, 12, dtype=dtype) for dtype in dtypes)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs.to(layer.weight.dtype)).relu()
        return inputs.float()


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = ((), (1,), (1, 1), (1, 1, 1, 1))
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, inputs):
        for scalar in self.scalars:
            inputs = inputs * scalar.view(()) + scalar.view(())
        return inputs


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.nothing, self.none = nn.Linear(12, 9), *map(nn.Parameter, (torch.ones(0, 3), torch.ones(0)))

    def forward(self, inputs):
        return self.linear(inputs) + self.nothing.sum() + self.none.sum()


class ComplexNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(12, 24, dtype=torch.complex64) / 4)
        self.second = nn.Parameter(torch.randn(24, 8, dtype=torch.complex64) / 4)
        self.shift = nn.Parameter(torch.zeros(8, dtype=torch.complex64))

    def forward(self, inputs):
        return inputs.to(torch.complex64) @ self.first @ self.second + self.shift


def convolutions():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 1, 3))
    return net.to(memory_format=torch.channels_last)


class Bfloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network().bfloat16()

    def forward(self, inputs):
        return self.net(inputs.bfloat16())


class Branches(nn.Module):
    """`aside` is used in some calls only: `used` says for each call whether it is."""

    def __init__(self, used):
        super().__init__()
        self.used = iter(used)
        self.main, self.aside = nn.Linear(12, 20), nn.Linear(12, 20)

    def forward(self, inputs):
        return self.main(inputs) + (self.aside(inputs) if next(self.used) else 0)


CASES = {
    "several buckets": Case(network),
    "one bucket": Case(network, options={}),
    "static graph": Case(network, options={**TINY_BUCKETS, "static_graph": True}),
    "frozen parameters": Case(frozen),
    "tied weights": Case(Tied),
    "mixed dtypes": Case(MixedDtypes),
    "channels last": Case(convolutions, shape=(2, 3, 6, 6)),
    "one-element parameters": Case(Scalars, shape=(2, 2)),
    "only one element": Case(functools.partial(nn.Linear, 1, 1, bias=False), shape=(2, 1)),
    "empty parameters": Case(Empty),
    "bfloat16 model": Case(Bfloat16),
    "complex parameters": Case(ComplexNumbers),
}
MARKS = {"complex parameters": complex_numbers}
COARSE = ("mixed dtypes", "bfloat16 model")  # their averages are rounded to bfloat16


def train_with(rank, world_size, case, specs):
    return {spec: train(rank, spec, CASES[case]) for spec in (None, *specs)}


def check(answers, specs=SPECS, coarse=False):
    for outcomes in answers:
        assert same(outcomes["none"].parameters, outcomes[None].parameters)
        for spec in specs:
            assert same(outcomes[spec].parameters, answers[0][spec].parameters), spec
            assert outcomes[spec].lost < (0.02 if coarse or spec == "bf16" else 1e-5), spec
            assert outcomes[spec].steps == 4


@pytest.mark.parametrize("case", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_ranks_agree_in_every_bit_none_equals_torch_and_no_gradient_is_lost(ranks, case):
    place = list(CASES).index(case)
    specs = ["none", SPECS[1 + place % 4]]  # each case with one that compresses
    check(ranks.run(train_with, 2, case, specs), specs, case in COARSE)


def train_with_and_without_views(rank, world_size):
    viewed = {**TINY_BUCKETS, "gradient_as_bucket_view": True}
    return {spec: [train(rank, spec, Case(network, options=o)) for o in (viewed, TINY_BUCKETS)] for spec in SPECS}


def test_gradients_as_bucket_views_change_no_bit(ranks):
    for outcomes in ranks.run(train_with_and_without_views, 2):
        for spec, (viewed, copied) in outcomes.items():
            assert same(viewed.parameters, copied.parameters), spec


def train_accumulating(rank, world_size):
    case = Case(network, options={**TINY_BUCKETS, "gradient_as_bucket_view": True})
    return {spec: train(rank, spec, case, micro_batches=3) for spec in (None, *SPECS)}


def test_accumulated_gradients_are_reduced_once_and_only_synced_backwards_count(ranks):
    check(ranks.run(train_accumulating, 2))


def train_uneven(rank, world_size):
    return {spec: train(rank, spec, Case(network), steps=3 + 2 * rank, join=True) for spec in (None, *SPECS)}


def test_under_join_ranks_agree_and_the_last_to_join_has_got_all_gradients(ranks):
    early, late = ranks.run(train_uneven, 2)
    assert same(late["none"].parameters, late[None].parameters)
    for spec in SPECS:
        assert same(early[spec].parameters, late[spec].parameters), spec
        assert early[spec].steps == late[spec].steps == 5
        assert late[spec].lost < (0.02 if spec == "bf16" else 1e-5), spec


def payloads_while_accumulating(rank, world_size):
    ddp = DistributedDataParallel(network())
    handle = gradwire.attach(ddp, "powersgd:rank=1,start_iter=2")
    payloads = []
    for step in range(4):
        backward(ddp, Case(network), rank, step, micro_batches=2)
        payloads.append(handle.stats().last.traffic.payload_bytes)
    handle.close()
    return payloads, 4 * sum(parameter.numel() for parameter in ddp.parameters())


def test_a_warm_up_lasts_as_many_synced_backwards_as_it_says(ranks):
    for payloads, dense in ranks.run(payloads_while_accumulating, 2):
        assert payloads[:2] == [dense, dense]
        assert payloads[2] == payloads[3] < dense / 2


def train_branches(rank, world_size, used, specs):
    options = {**TINY_BUCKETS, "find_unused_parameters": True}
    case = Case(functools.partial(Branches, used[rank]), options=options)
    return {spec: train(rank, spec, case) for spec in specs}


def test_a_parameter_that_some_ranks_do_not_use_gets_the_average_all_the_same(ranks):
    used = ((True, True, False, True, True), (True, False, True, False, True))
    check(ranks.run(train_branches, 2, used, (None, *SPECS)))


UNUSED_IN_TWO_STEPS = ((True, False, True, False, True),) * 2


def test_a_parameter_that_no_rank_uses_is_left_alone(ranks):
    answers = ranks.run(train_branches, 2, UNUSED_IN_TWO_STEPS, (None, *SPECS))
    for outcomes in answers:
        assert same(outcomes["none"].parameters, outcomes[None].parameters)
        assert all(same(outcomes[spec].parameters, answers[0][spec].parameters) for spec in SPECS)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.1", "onebit:error_feedback=1", "batched-powersgd"])
def test_what_is_held_back_outlives_steps_that_do_not_use_the_parameter(ranks, spec):
    for outcomes in ranks.run(train_branches, 2, UNUSED_IN_TWO_STEPS, (spec,)):
        assert outcomes[spec].lost < 1e-5


class Chosen(nn.Module):
    """Two layers, of which a step uses some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(2))

    def forward(self, inputs, used):
        return sum(self.layers[index](inputs).sum() for index in used)


def layer_by_layer():
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    return DistributedDataParallel(Chosen(), bucket_cap_mb=0.0005, **options)  # a bucket a layer


skipping = pytest.mark.skipif(
    "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP sends all buckets",
)
USED = ([0, 1], [1], [0], [1], [0, 1])


def steps_by_layers(rank, world_size, attach):
    ddp = layer_by_layer()
    if attach:
        handle = gradwire.attach(ddp, "none")
    else:
        ddp.register_comm_hook(None, gradwire.comm_hook("none"))
        handle = gradwire.handle_of(ddp)
    seen = []
    for used in USED:
        ddp(torch.ones(3, 12), used).backward()
        seen.append((handle.stats().steps, len(handle.stats().buckets)))
    handle.close()
    return seen


@skipping
@pytest.mark.parametrize("attach", [True, False])
def test_a_step_may_begin_with_any_bucket_where_those_that_no_rank_used_are_not_handed_over(ranks, attach):
    assert ranks.run(steps_by_layers, 2, attach) == [[(1, 2), (2, 1), (3, 1), (4, 1), (5, 2)]] * 2


def stopped_by_layers(rank, world_size, spec):
    """Gradients of all steps, without a stop and with one after each step; and the steps that the saved states tell."""
    runs, told = [], []
    for stop in range(len(USED)):
        ddp, gradients = layer_by_layer(), []
        handle = gradwire.attach(ddp, spec)
        for step, used in enumerate(USED, 1):
            ddp.zero_grad()
            ddp(batch((3, 12), rank, step), used).backward()
            gradients += [layer.weight.grad for layer in ddp.module.layers if layer.weight.grad is not None]
            if step == stop:
                saved = copy.deepcopy(handle.state_dict())
                told.append(saved["step"])
                handle.close()
                ddp = layer_by_layer()
                handle = gradwire.attach(ddp, spec)
                handle.load_state_dict(saved)
        handle.close()
        runs.append(gradients)
    return runs, told


@skipping
@pytest.mark.parametrize("spec", ["powersgd:rank=1", "onebit"])
def test_a_state_is_that_of_the_last_step_whichever_buckets_this_one_handed_over(ranks, spec):
    for (whole, *stopped), told in ranks.run(stopped_by_layers, 2, spec):
        assert told == [1, 2, 3, 4]
        assert all(same(gradients, whole) for gradients in stopped)
