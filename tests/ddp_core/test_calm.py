"""Steps that go as those before hear of few gradients; whatever then comes differently is noticed all the same."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import gradwire

from .nets import WIDTH

STEPS = 12


class Changing(nn.Module):
    """Four layers with biases.

    A step may use them in another order, leave some out, bring an undefined gradient, or compute some of them a second
    time in a backward within the backward.
    """

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))
            self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, inputs, order=(0, 1, 2, 3), undefined=False, again=()):
        for place, index in enumerate(order):
            layer = self.layers[index]
            inputs = (checkpoint(layer, inputs, use_reentrant=True) if place in again else layer(inputs)).tanh()
            if place == 1:
                inputs = (Undefined if undefined else Shifted).apply(inputs, self.shift)
        return inputs


class Shifted(torch.autograd.Function):
    """A sum."""

    @staticmethod
    def forward(ctx, inputs, shift):
        return inputs + shift

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum(0)


class Undefined(Shifted):
    """A sum that forgets one of its gradients."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def inputs_of(rank, step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def hooked(model):
    """How many parameters have hooks."""
    return len(model.reducer._calm._hooks._handles)


def train(model, rank, step, between=None, **how):
    loss = model(inputs_of(rank, step), **how).square().sum()
    if between:
        between(model)
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    model.zero_grad()


def parameters_of(model):
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def both(steps, train_step, *, module=Changing, hook=None, **options):
    """The parameters of ours and of torch's after the same steps; and how many hooks ours had after each."""
    models = [kind(module(), **options) for kind in (gradwire.DistributedDataParallel, TorchDDP)]
    ours, _ = models
    if hook:
        ours.register_comm_hook(dist.group.WORLD, hook)
    seen = []
    for step in range(steps):
        for model in models:
            train_step(model, step)
        seen.append(hooked(ours))
    ours.compression.close()
    return [parameters_of(model) for model in models], seen


def compared(rank, world_size, changes, as_view, cap):
    """Ours and torch's after the same steps, of which some are `changes`."""

    def train_step(model, step):
        train(model, rank, step, **changes.get(step, {}))

    return both(STEPS, train_step, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)


OTHER_ORDER = {"order": (2, 0, 3, 1)}
CHANGES = {
    "nothing": {},
    "the order, once": {6: OTHER_ORDER},
    "the order, from then on": dict.fromkeys(range(6, STEPS), OTHER_ORDER),
    "an undefined gradient": {6: {"undefined": True}},
    "a layer computed again": {step: {"again": (2,)} for step in range(6, STEPS)},
    "all layers computed again": {step: {"again": (1, 2, 3)} for step in range(6, STEPS)},
    "all layers always computed again": {step: {"again": (1, 2, 3)} for step in range(STEPS)},
}


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("cap", [1e-6, 2e-3, 1.0])
@pytest.mark.parametrize("changes", CHANGES)
def test_whatever_changes_the_result_is_torch_s(ranks, changes, as_view, cap):
    for (ours, torchs), seen in ranks.run(compared, 2, CHANGES[changes], as_view, cap):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
        if cap == 1.0 and changes in HOOKS:
            assert seen == [ALL] * 3 + HOOKS[changes]


ALL, FEW = 9, 2  # of a model in one bucket, the first gradient and the last one tell
HOOKS = {
    "nothing": [FEW] * 9,
    "the order, once": [FEW] * 3 + [FEW + 2] + [ALL] * 4 + [FEW],
    "the order, from then on": [FEW] * 3 + [FEW + 2] + [ALL] * 5,
    "an undefined gradient": [FEW] * 3 + [FEW + 1] + [ALL] * 4 + [FEW],
}


def leaves_out(rank, world_size):
    """The error, if a step leaves a layer out when few parameters have hooks; and how many had in the steps before."""
    model = gradwire.DistributedDataParallel(Changing())
    seen = []
    for step in range(5):
        train(model, rank, step)
        seen.append(hooked(model))
    train(model, rank, 5, order=(0, 1, 3))
    with pytest.raises(RuntimeError) as raised:
        train(model, rank, 6)
    model.compression.close()
    return seen, str(raised.value)


def test_who_is_left_out_is_named_though_it_had_no_hook(ranks):
    for seen, message in ranks.run(leaves_out, 2):
        assert seen[-1] == FEW
        assert "Expected to have finished reduction in the prior iteration" in message
        assert message.splitlines()[-2].endswith(": layers.2.weight, layers.2.bias"), message


class Halves(Changing):
    """Two losses of different parameters."""

    def forward(self, inputs):
        first, second = inputs, self.layers[1](inputs) + self.shift
        first = self.layers[0](first)
        return self.layers[2](first).square().sum(), self.layers[3](second).square().sum()


def in_parts(rank, world_size):
    """Ours and torch's where from step 5 on one forward has two backwards, each of one half of the loss."""

    def train_step(model, step):
        first, second = model(inputs_of(rank, step))
        if step < 5:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
        model.zero_grad()

    return both(8, train_step, module=Halves, bucket_cap_mb=1.0)


def test_a_forward_may_have_several_backwards_that_bring_all_gradients_together(ranks):
    for (ours, torchs), _ in ranks.run(in_parts, 2):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def twice(rank, world_size, as_view):
    """The errors of a step, when few parameters have hooks, that brings a layer's gradients a second time."""
    model = gradwire.DistributedDataParallel(Changing(), gradient_as_bucket_view=as_view)
    for step in range(5):
        train(model, rank, step)
    assert hooked(model) == FEW
    errors = []
    for step in (5, 6):
        anew = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
        late = checkpoint(
            model.module.layers[2], anew, use_reentrant=True
        )  # the first in forward, the last in backward
        with pytest.raises(RuntimeError) as raised:
            (model(inputs_of(rank, step)).square().sum() + late.sum()).backward()
        errors.append(str(raised.value))
    model.compression.close()
    return errors


@pytest.mark.parametrize("as_view", [False, True])
def test_a_second_gradient_of_one_without_a_hook_is_noticed(ranks, as_view):
    for first, second in ranks.run(twice, 2, as_view):
        assert "Expected to mark a variable ready only once, but parameter layers.2." in first
        assert "What went wrong: Expected to mark a variable ready only once" in second


def unheard(rank, world_size):
    """The error after a backward to one parameter without a hook; and none after gradients that are only asked for."""
    model = gradwire.DistributedDataParallel(Changing())
    for step in range(6):
        train(model, rank, step)
    assert hooked(model) == FEW
    middle = model.module.layers[2].weight
    torch.autograd.grad(model(inputs_of(rank, 6)).sum(), [middle])
    train(model, rank, 7)
    assert hooked(model) == FEW
    model(inputs_of(rank, 8)).sum().backward(inputs=[middle])
    model.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        model(inputs_of(rank, 9))
    model.compression.close()
    return [str(raised.value)]


def test_a_backward_that_only_parameters_without_hooks_hear_of_is_told_of(ranks):
    for (message,) in ranks.run(unheard, 2):
        assert "Expected to have finished reduction in the prior iteration" in message
        assert "layers.2.weight" not in message.splitlines()[-2]


def by_hand(rank, world_size):
    """Gradients that are assigned, each after a pass of its own, do not look like a backward."""
    model = gradwire.DistributedDataParallel(Changing())
    for step in range(5):
        train(model, rank, step)
    outputs = model(inputs_of(rank, 5))
    parameters = list(model.parameters())
    for scale in (1.0, 2.0):
        found = torch.autograd.grad((outputs * scale).sum(), parameters, retain_graph=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
    model.zero_grad()
    train(model, rank, 6)
    few = hooked(model)
    model.compression.close()
    return [few]


def test_gradients_assigned_by_hand_are_not_taken_for_a_backward(ranks):
    assert ranks.run(by_hand, 2) == [[FEW], [FEW]]


def writes_gradients(group, bucket):
    """A hook that works on the parameters' parts of a bucket."""
    work = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in bucket.gradients()]
    for each in work:
        each.wait()
    for gradient in bucket.gradients():
        gradient.copy_(gradient / group.size())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def with_a_writing_hook(rank, world_size, as_view):
    return both(7, lambda model, step: train(model, rank, step), hook=writes_gradients, gradient_as_bucket_view=as_view)


@pytest.mark.parametrize("as_view", [False, True])
def test_a_hook_may_write_the_gradients_of_a_bucket(ranks, as_view):
    for (ours, torchs), _ in ranks.run(with_a_writing_hook, 2, as_view):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


class Heads(nn.Module):
    """A trunk and one head, either of which a model may share."""

    def __init__(self, trunk, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.head = trunk, nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, inputs):
        return self.head(self.trunk(inputs).tanh()).square().sum()


def sharing(rank, world_size, kind):
    """The parameters of two wrappers that share a trunk, trained by the sum of their losses."""
    torch.manual_seed(0)
    trunk = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    models = [kind(Heads(trunk, seed)) for seed in (1, 2)]
    for step in range(8):
        sum(model(inputs_of(rank, step)) for model in models).backward()
        parameters = {parameter for model in models for parameter in model.parameters()}
        torch.optim.SGD(list(parameters), 0.01).step()
        for model in models:
            model.zero_grad()
    return torch.cat([parameters_of(model) for model in models])


def both_sharing(rank, world_size):
    return [sharing(rank, world_size, gradwire.DistributedDataParallel), sharing(rank, world_size, TorchDDP)]


def test_two_models_may_share_parameters_and_a_backward(ranks):
    for ours, torchs in ranks.run(both_sharing, 2):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def freed(rank, world_size):
    """How many gradients that nobody else holds are there after zero_grad."""
    model = gradwire.DistributedDataParallel(Changing())
    for step in range(5):
        train(model, rank, step)
    model(inputs_of(rank, 5)).sum().backward()
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    model.compression.close()
    return [sum(reference() is not None for reference in gradients)]


def test_gradients_that_parameters_give_up_are_freed(ranks):
    assert ranks.run(freed, 1) == [[0]]


def keeps_gradients(rank, world_size, how):
    """Ours and torch's where gradients are not None when a step begins."""

    def train_step(model, step):
        if how == "accumulates" and step >= 5:
            with model.no_sync():
                model(inputs_of(rank, 50 + step)).square().sum().backward()
        if how == "fills with zeros":
            model.zero_grad(set_to_none=False)
        loss = model(inputs_of(rank, step)).square().sum()
        if how == "clears after forward" and step >= 5:
            model.zero_grad()
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
        if how == "accumulates" or step < 4:
            model.zero_grad()

    return both(10, train_step, bucket_cap_mb=1.0)


@pytest.mark.parametrize("how", ["accumulates", "fills with zeros", "clears after forward"])
def test_gradients_that_are_there_before_need_hooks(ranks, how):
    for (ours, torchs), seen in ranks.run(keeps_gradients, 2, how):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
        assert seen[4] == FEW
        assert seen[-1] == ALL


def nodes_kept(rank, world_size):
    """In each step, how many gradients have the node that they had in the step before."""
    model = gradwire.DistributedDataParallel(Changing())
    kept = []
    for step in range(7):
        output = model(inputs_of(rank, step))
        marks = [get_gradient_edge(parameter).node.metadata for parameter in model.parameters()]
        kept.append(sum("met" in mark for mark in marks))
        for mark in marks:
            mark["met"] = True
        output.square().sum().backward()
        del output
        model.zero_grad()
    hooks = hooked(model)
    model.compression.close()
    return kept, hooks, len(marks)


def test_parameters_without_hooks_have_nodes_that_never_had_one(ranks):
    for kept, hooks, parameters in ranks.run(nodes_kept, 2):
        assert kept[1] == parameters
        assert kept[-1] == hooks < parameters
