"""Parameters that change after the model was wrapped: never silently left out of the averages, and taken in by refresh()."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrizations

import gradwire

from ..errors import message_of, warned
from ..wrapping import wrapped

WIDTH = 6
RATE = 0.1


class Adapted(nn.Module):
    """A layer with another beside it."""

    def __init__(self, layer):
        super().__init__()
        self.base, self.adapter = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.base(inputs) + self.adapter(inputs)


def network(frozen=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    net[0].requires_grad_(not frozen)
    return net


def assigned(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def through_meta(net):
    net.to("meta")
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)


def adapted(net):
    torch.manual_seed(dist.get_rank())  # an adapter of its own on each rank
    net[0] = Adapted(net[0])


def normed(net):
    parametrizations.weight_norm(net[0])


def replaced(net):
    net[0].weight = nn.Parameter(net[0].weight.detach() + 1)


REPLACED = {
    "to double and back": lambda net: net.double().float(),
    "load_state_dict(assign=True)": assigned,
    "to_empty": through_meta,
    "another parameter": replaced,
}
ADDED = {"an adapter": adapted, "an unfrozen layer": lambda net: net[0].requires_grad_(True), "weight_norm": normed}
CHANGES = {**REPLACED, **ADDED}


def made(kind, change=""):
    net = network(frozen=change == "an unfrozen layer")
    return wrapped(kind == "own", net, "none", find_unused_parameters=True)[0]


def step(model, rank, number=0):
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))
    model.zero_grad()
    model(inputs).square().sum().backward()


def told(model, rank, change, late):
    """What the next steps say, errors and warnings, after a change before the first step or after some."""
    if late:
        for number in range(3):
            step(model, rank, number)
    CHANGES[change](model.module)
    if late:
        (model._strays if hasattr(model, "_strays") else strays_of(model)).due = True  # as 64 steps later
    with warned("averaged") as texts:
        error = message_of(lambda: [step(model, rank, number) for number in range(3)])
    return ("error", error) if error else ("warning", *texts)


def strays_of(model):
    return next(hook for hook in model._forward_pre_hooks.values() if hasattr(hook, "strays")).strays


def all_told(rank, world_size, kind, late):
    return {change: told(made(kind, change), rank, change, late) for change in CHANGES}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["own", "attached"])
def test_a_parameter_that_changed_after_the_wrap_is_named(ranks, kind, late):
    for found in ranks.run(all_told, 2, kind, late):
        for change, (what, *texts) in found.items():
            assert (change, what) == (change, "error" if change in REPLACED else "warning")
            assert len(texts) == 1, change
            assert "weight" in texts[0]
            assert ("refresh()" if kind == "own" else "wrap the model anew") in texts[0]


def unchanged(rank, world_size, kind):
    """The warnings of a training in which nothing changed but what may: freezing, no_sync, evaluation, moved buffers."""
    with warned("averaged") as texts:
        model = made(kind)
        for number in range(3):
            model.train()
            step(model, rank, number)
            model.eval()
            model(torch.ones(1, WIDTH))
            model.float()
            model.load_state_dict(model.state_dict())
            with model.no_sync():
                model(torch.ones(1, WIDTH)).sum().backward()
        model.module[0].requires_grad_(False)
        step(model, rank)
        model.module[0].requires_grad_(True)
        step(model, rank)
        copy.deepcopy(model.module)
    return texts


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_nothing_is_said_of_parameters_that_stayed(ranks, kind):
    assert ranks.run(unchanged, 2, kind) == [[], []]


def refreshed(rank, world_size, compressor):
    """How far gradients are from the mean of all ranks' after each change and refresh()."""
    found = {}
    for change, apply in CHANGES.items():
        net = network(frozen=change == "an unfrozen layer")
        model = gradwire.DistributedDataParallel(net, compressor=compressor, find_unused_parameters=True)
        step(model, rank)
        apply(model.module)
        model.refresh()
        alone = copy.deepcopy(model.module)
        means = [torch.zeros_like(each) for each in alone.parameters()]
        for other in range(world_size):
            step(alone, other, 7)
            for mean, each in zip(means, alone.parameters(), strict=True):
                mean.add_(each.grad, alpha=1 / world_size)
        step(model, rank, 7)
        pairs = zip(model.parameters(), means, strict=True)
        found[change] = max((each.grad - mean).abs().max().item() for each, mean in pairs)
    return found


def test_refresh_averages_what_trains_now(ranks):
    one, other = ranks.run(refreshed, 2, "none")
    assert max(one.values()) < 1e-5
    assert one.keys() == CHANGES.keys()
    assert max(other.values()) < 1e-5


def residuals(rank, world_size):
    """By name what is held back before and after a refresh(), where one layer is frozen, one replaced, one kept.

    The loss scale has changed since the last step.
    """
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    scaler = SimpleNamespace(get_scale=lambda: scaler.scale, scale=1.0)
    model = gradwire.DistributedDataParallel(net, compressor="topk:ratio=0.2", scaler=scaler)
    step(model, rank)
    before = model.compression.state_dict()["parameters"]
    net[0].requires_grad_(False)
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())
    scaler.scale = 4.0
    model.refresh()
    after = model.compression.state_dict()["parameters"]
    pairs = {name: [(4 * before[name][field], after[name][field]) for field in before[name]] for name in after}
    step(model, rank)
    return {name: all(torch.equal(*pair) for pair in of_name) for name, of_name in pairs.items()}


def test_refresh_keeps_residuals_by_name_at_the_new_loss_scale_and_drops_those_of_frozen_parameters(ranks):
    assert ranks.run(residuals, 2) == [{"1.weight": True, "2.weight": True}] * 2


def after_refusal(rank, world_size):
    """Gradients after a refresh() that raised."""
    model = gradwire.DistributedDataParallel(network(), compressor="topk:ratio=0.2")
    step(model, rank)
    model.compression.load_state_dict(model.compression.state_dict())
    model.compression.swap("none")
    with pytest.raises(RuntimeError, match="loaded, then swapped"):
        model.refresh()
    step(model, rank)
    return [each.grad for each in model.parameters()]


def test_after_a_refresh_that_was_refused_gradients_are_averaged_as_before(ranks):
    one, other = ranks.run(after_refusal, 2)
    assert all(map(torch.equal, one, other))


def trained_by_module(rank, world_size):
    """Warnings of a training of model.module, before any step of the wrapper."""
    with warned("averaged") as texts:
        model = gradwire.DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for number in range(5):
            step(model.module, rank, number)
            optimizer.step()
    return texts


def test_training_the_bare_module_is_noticed_once(ranks):
    for texts in ranks.run(trained_by_module, 2):
        assert len(texts) == 1
        assert ".module" in texts[0]


def fused(rank, world_size, kind, drops):
    """The error of a step whose optimizer steps inside backward."""
    model, _ = wrapped(kind == "own", network(), "none")
    optimizers = {each: torch.optim.SGD([each], 0.0) for each in model.parameters()}

    def stepped(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    if drops:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(stepped)
    return message_of(step, model, rank)


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_an_optimizer_that_clears_gradients_before_they_are_averaged_is_refused(ranks, kind):
    for text in ranks.run(fused, 2, kind, True):
        assert "cleared" in text
        assert "0.weight" in text or "2.bias" in text
    assert ranks.run(fused, 2, kind, False) == ["", ""]


class Head(nn.Module):
    """A layer behind an encoder that others use, too."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.last(self.encoder(inputs))


def side_by_side(rank, world_size, other):
    """Warnings of two wrappers that share an encoder and are trained in turn."""
    gc.unfreeze()
    with warned("averages were handed out") as texts:
        encoder = nn.Linear(WIDTH, WIDTH)
        models = [gradwire.DistributedDataParallel(Head(encoder)), other(Head(encoder))]
        for _ in range(3):
            for model in models:
                model(torch.ones(2, WIDTH) * rank).square().sum().backward()
            gradients = [torch.empty_like(encoder.weight) for _ in range(world_size)]
            dist.all_gather(gradients, encoder.weight.grad)
            assert torch.allclose(*gradients)
    return texts


@pytest.mark.parametrize("other", [gradwire.DistributedDataParallel, TorchDDP])
def test_an_encoder_in_two_wrappers_is_no_late_gradient(ranks, other):
    assert ranks.run(side_by_side, 2, other) == [[], []]
