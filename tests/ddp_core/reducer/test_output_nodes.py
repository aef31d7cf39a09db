"""How the reducer learns that a backward begins: outputs of any shape, passes that are no backward, several forwards."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import gradwire

from ..errors import warned
from ..layers import DYNAMIC, Layers, expected_average, gradients_of, inputs_of, summed
from ..nets import linear, same


@dataclass(frozen=True)
class Answer:
    value: Any
    note: str = ""


class Opaque:
    """An object that nobody can look into."""

    def __init__(self, value):
        self.value = value


class Wrapped(nn.Module):
    """Two layers, of which one is used, behind an output of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.busy, self.idle, self.kind = linear(), linear(), kind

    def forward(self, inputs):
        value = self.busy(inputs)
        if self.kind == "attribute":
            self.value = value
            return None
        kinds = {"dataclass": Answer, "opaque": Opaque, "nested": lambda v: {"a": [Answer((v, 1)), "text", None]}}
        return kinds[self.kind](value)


READ = {
    "dataclass": lambda model, answer: answer.value,
    "opaque": lambda model, answer: answer.value,
    "nested": lambda model, answer: answer["a"][0].value[0],
    "attribute": lambda model, answer: model.module.value,
}


def through(rank, world_size, kind, skip):
    model = gradwire.DistributedDataParallel(Wrapped(kind), **DYNAMIC, skip_all_reduce_unused_params=skip)
    for step in range(2):
        model.zero_grad()
        READ[kind](model, model(inputs_of(rank, step))).square().sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", READ)
def test_unused_parameters_are_found_whatever_forward_returns(ranks, kind):
    for skip in (False, True):
        answers = ranks.run(through, 2, kind, skip)
        for gradients in answers:
            assert gradients[2:] == [None, None]
            assert same(gradients, answers[0])


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(linear(), nn.Tanh(), linear())
        self.idle = linear()

    def forward(self, inputs):
        return self.net(inputs)


def with_gradient_penalty(rank, world_size, options):
    """The penalty asks for gradients of inputs, and once for those of a weight, before the one real backward."""
    model = gradwire.DistributedDataParallel(Penalized(), **options)
    alone = Penalized()
    alone.load_state_dict(model.module.state_dict())
    penalties = []
    for net, members in ((model, [rank]), (alone, range(world_size))):
        for step in range(2):
            net.zero_grad()
            for member in members:
                inputs = inputs_of(member, step)
                output = net(inputs)
                (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
                weight = (net.module if net is model else net).net[0].weight
                torch.autograd.grad(output.sum(), weight, retain_graph=True)
                ((output.square().sum() + slope.square().sum()) / len(members)).backward()
        penalties.append(gradients_of(net))
    return penalties


@pytest.mark.parametrize("skip", [False, True])
def test_torch_autograd_grad_is_not_taken_for_a_backward(ranks, skip):
    for ours, alone in ranks.run(with_gradient_penalty, 2, {**DYNAMIC, "skip_all_reduce_unused_params": skip}):
        torch.testing.assert_close(ours, alone)


def two_forwards(rank, world_size, options, kind):
    model = gradwire.DistributedDataParallel(Layers(), **options)
    for _ in range(2):
        model.zero_grad()
        first = model(inputs_of(rank, 0), (0, 1, 2) if options else (0, 1, 2, 3))
        if kind == "both":
            loss = first.square().sum() + model(inputs_of(rank, 1), (1, 2, 3)).square().sum()
        elif kind == "the first, and one without a graph between":
            with torch.no_grad():
                model(inputs_of(rank, 1), (3,))
            loss = first.square().sum()
        else:
            loss = model(inputs_of(rank, 1), (1, 2, 3) if options else (0, 1, 2, 3)).square().sum()
        loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", ["both", "the first, and one without a graph between", "the second"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_of_two_forwards_those_count_that_the_one_backward_reaches(ranks, kind, dynamic):
    first, second = (0, 1, 2) if dynamic else (0, 1, 2, 3), (1, 2, 3) if dynamic or kind == "both" else (0, 1, 2, 3)
    parts = [expected_average([first] * 2, 0), expected_average([second] * 2, 1)]
    parts = {"both": parts, "the second": parts[1:]}.get(kind, parts[:1])
    for gradients in ranks.run(two_forwards, 2, DYNAMIC if dynamic else {}, kind):
        torch.testing.assert_close(gradients, summed(parts))


class Undefined(torch.autograd.Function):
    """A product whose second factor gets no gradient, though the graph leads to it."""

    @staticmethod
    def forward(ctx, inputs, factor):
        ctx.save_for_backward(factor)
        return inputs * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class WithoutGradient(Layers):
    """A factor that is used, but whose gradient is undefined on request."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs, defined):
        inputs = inputs * self.factor if defined else Undefined.apply(inputs, self.factor)
        return super().forward(inputs, (0, 1, 2, 3))


def undefined(rank, world_size, where):
    """The gradient of the factor in a step whose ranks `where` define it, and what it was in the step before."""
    model = gradwire.DistributedDataParallel(WithoutGradient(), **DYNAMIC)
    history = []
    for defined in (False, True, rank in where):
        model(inputs_of(rank), defined).square().sum().backward()
        gradient = model.module.factor.grad
        history.append(None if gradient is None else gradient.item())
    return history


def test_a_parameter_whose_gradient_is_undefined_everywhere_is_left_alone(ranks):
    for never, before, after in ranks.run(undefined, 2, ()):
        assert never is None
        assert before == after


def test_a_parameter_whose_gradient_is_undefined_on_some_ranks_gets_the_average(ranks):
    alone = []
    for rank in range(2):
        net = WithoutGradient()
        net(inputs_of(rank), True).square().sum().backward()
        alone.append(net.factor.grad.item())
    for never, before, after in ranks.run(undefined, 2, (1,)):
        assert never is None
        assert before == pytest.approx(sum(alone) / 2)
        assert after == pytest.approx(before + alone[1] / 2)


def only_some_inputs(rank, world_size):
    """backward(inputs=...) brings gradients of those alone."""
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC)
    chosen = [model.module.layers[1].weight]
    model(inputs_of(rank), (0, 1)).square().sum().backward(inputs=chosen)
    return gradients_of(model)


def test_a_backward_for_some_parameters_averages_those(ranks):
    expected = expected_average([(0, 1)] * 2)
    for gradients in ranks.run(only_some_inputs, 2):
        torch.testing.assert_close(gradients, [None, None, expected[2], *[None] * 5])


def backward_twice(rank, world_size):
    model = gradwire.DistributedDataParallel(Layers())
    loss = model(inputs_of(rank), (0, 1, 2, 3)).square().sum()
    caught = []
    for _ in range(3):
        with warned() as texts:
            loss.backward(retain_graph=True)
        caught.append(texts)
    return caught, gradients_of(model)


def test_a_second_backward_from_one_forward_stays_local_as_in_torch_and_says_so_once(ranks):
    average = expected_average([(0, 1, 2, 3)] * 2)
    for rank, (caught, gradients) in enumerate(ranks.run(backward_twice, 2)):
        assert [len(texts) for texts in caught] == [0, 1, 0]
        assert "stays this rank's own" in caught[1][0]
        net = Layers()
        net(inputs_of(rank), (0, 1, 2, 3)).square().sum().backward()
        for gradient, mean, own in zip(gradients, average, gradients_of(net), strict=True):
            torch.testing.assert_close(gradient, mean + 2 * own)
