"""Static graphs: parameters that fire several times or never, and what deviates from the first iteration."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire

from ..layers import CAP, Layers, expected_average, gradients_of, inputs_of
from ..nets import linear, same

VARIANTS = [{"gradient_as_bucket_view": view, "bucket_cap_mb": CAP} for view in (False, True)]


class Checkpointed(nn.Module):
    """Three layers; those that `plan` lists run in checkpoints, one after the other."""

    def __init__(self, plan, reentrant):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.layers = nn.ModuleList(linear() for _ in range(3))
            self.idle = linear()
        self.plan, self.reentrant = plan, reentrant

    def forward(self, inputs):
        values = inputs
        for index, checkpointed in self.plan:
            layer = self.layers[index]
            values = checkpoint(layer, values, use_reentrant=self.reentrant) if checkpointed else layer(values)
            values = values.tanh()
        return values


IN_TWO = ((0, True), (1, False), (0, True), (2, True))  # layer 0 in two checkpoints
IN_ONE = ((0, True), (1, False), (2, True))


def checkpointed(rank, world_size, plan, reentrant, net=Checkpointed, **options):
    """The gradients of the last step, and what one process computes from all inputs without checkpoints."""
    model = gradwire.DistributedDataParallel(net(plan, reentrant), **options)
    for step in range(3):
        model.zero_grad()
        model(inputs_of(rank, step)).square().sum().backward()
    alone = net([(index, False) for index, _ in plan], False)
    for member in range(world_size):
        (alone(inputs_of(member, 2)).square().sum() / world_size).backward()
    return gradients_of(model), gradients_of(alone)


def check(answers):
    for gradients, expected in answers:
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=["copies", "views"])
def test_in_a_static_graph_parameters_may_fire_in_several_checkpoints_or_never(ranks, variant, reentrant):
    check(ranks.run(checkpointed, 2, IN_TWO, reentrant, **variant, static_graph=True))


class WithoutIdle(Checkpointed):
    def __init__(self, plan, reentrant):
        super().__init__(plan, reentrant)
        self.idle = None


@pytest.mark.parametrize(
    ("plan", "reentrant", "dynamic"),
    [(IN_ONE, True, False), (IN_ONE, False, False), (IN_TWO, False, False), (IN_TWO, False, True)],
)
def test_without_a_static_graph_checkpoints_work_that_fire_each_parameter_once(ranks, plan, reentrant, dynamic):
    net = Checkpointed if dynamic else WithoutIdle
    check(ranks.run(checkpointed, 2, plan, reentrant, net, bucket_cap_mb=CAP, find_unused_parameters=dynamic))


def errors_of_checkpoints(rank, world_size):
    messages = []
    for plan, dynamic in ((IN_TWO, False), (IN_ONE, True)):
        model = (Checkpointed if dynamic else WithoutIdle)(plan, True)
        ddp = gradwire.DistributedDataParallel(model, find_unused_parameters=dynamic)
        with pytest.raises(RuntimeError) as caught:
            ddp(inputs_of(rank)).square().sum().backward()
        messages.append(str(caught.value))
    return messages


def test_what_reentrant_checkpoints_cannot_do_says_so_with_the_parameter_and_the_way_out(ranks):
    for twice, unseen in ranks.run(errors_of_checkpoints, 2):
        assert "Expected to mark a variable ready only once" in twice
        assert "parameter layers.0." in twice
        assert "static_graph=True" in twice
        assert "find_unused_parameters=True does not see into checkpoints" in unseen
        assert "use_reentrant=False" in unseen


def deviates(rank, world_size, first, then):
    """What the second and the third forward and backward raise, when the second uses other layers than the first."""
    model = gradwire.DistributedDataParallel(Layers(), static_graph=True, bucket_cap_mb=CAP)
    model(inputs_of(rank), first).square().sum().backward()
    for used in (then, first):
        try:
            model(inputs_of(rank), used).square().sum().backward()
        except RuntimeError as error:
            return [str(error)]
    return []


@pytest.mark.parametrize(
    ("first", "then", "name"),
    [((0, 1, 2, 3), (0, 2, 3), "layers.1.weight"), ((0, 2, 3), (0, 1, 2, 3), "layers.1."), ((0, 1), (2,), "layers.2.")],
)
def test_a_deviation_from_the_first_iteration_is_an_error_that_names_a_parameter(ranks, first, then, name):
    for (message,) in ranks.run(deviates, 2, first, then):
        assert "our training graph has changed in this iteration" in message
        assert name in message


def left_out_on_one_rank(rank, world_size, options):
    """Layer 1 is used on rank 0 alone, layer 3 nowhere, in every iteration alike."""
    model = gradwire.DistributedDataParallel(Layers(), static_graph=True, **options)
    histories = []
    for step in range(3):
        model.zero_grad(set_to_none=step < 2)
        model(inputs_of(rank, step), (0, 1, 2) if rank == 0 else (0, 2)).square().sum().backward()
        histories.append(gradients_of(model))
    return histories, model.compression.stats().last.traffic.payload_bytes


@pytest.mark.parametrize("skip", [False, True])
def test_in_a_static_graph_too_a_parameter_that_any_rank_uses_gets_the_average_on_all(ranks, skip):
    for variant in VARIANTS:
        options = {**variant, "skip_all_reduce_unused_params": skip}
        for histories, sent in ranks.run(left_out_on_one_rank, 2, options):
            for step, gradients in enumerate(histories[:2]):
                assert same(gradients, expected_average([(0, 1, 2), (0, 2)], step))
            layer = sum(gradient.nbytes for gradient in gradients[:2])
            assert sent == (3 if skip else 4) * layer


def checkpointed_from_outside(rank, world_size):
    """The whole of DDP runs twice inside re-entrant checkpoints of the user's; each inner backward is synchronized."""
    model = gradwire.DistributedDataParallel(Layers())
    first = inputs_of(rank)
    values = checkpoint(model, first, (0, 1, 2, 3), use_reentrant=True)
    checkpoint(model, values, (0, 1, 2, 3), use_reentrant=True).square().sum().backward()
    alone = Layers()
    for member in range(world_size):
        values = alone(inputs_of(member), (0, 1, 2, 3))
        (alone(values, (0, 1, 2, 3)).square().sum() / world_size).backward()
    return gradients_of(model), gradients_of(alone)


def test_a_model_that_is_itself_checkpointed_is_averaged_too(ranks):
    check(ranks.run(checkpointed_from_outside, 2))
