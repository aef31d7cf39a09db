"""A parameter that is unfrozen after wrapping, and so in no bucket, is named at the first step that trains it."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..ddp_core.errors import warned
from .given import compressed

FROZEN_STEPS = 5


def named_at(rank, world_size, kind):
    """The steps at which a warning names the parameter."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    model, handle = compressed(kind, net, "int8")
    steps = []
    for step in range(FROZEN_STEPS + 3):
        net[0].requires_grad_(step >= FROZEN_STEPS)
        with warned("0.weight") as texts:
            model(torch.ones(2, 4)).sum().backward()
        steps += [step] * len(texts)
    handle.close()
    return steps


@pytest.mark.parametrize("kind", ["attached", "own"])
def test_the_first_step_with_an_unfrozen_parameter_names_it(ranks, kind):
    assert ranks.run(named_at, 2, kind) == [[FROZEN_STEPS]] * 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


def backward(model, rank, step, scale=1.0):
    """The gradients of a step, by name."""
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + step))
    (scale * model(inputs).square().mean()).backward()
    found = {name: each.grad.clone() for name, each in model.module.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def wrapped_anew(rank, world_size, spec, resize):
    """As the warning says: what was held back before, and comes out after; gradients then, and by torch; all warnings."""
    net = network()
    net[0].requires_grad_(False)
    model = TorchDDP(net)
    handle = gradwire.attach(model, spec)
    for step in range(3):
        backward(model, rank, step)
    states = [None] * world_size
    torch.distributed.all_gather_object(states, handle.state_dict())
    handle.swap("none")
    owed = backward(model, rank, 3, scale=0)
    handle.close()
    net[0].requires_grad_(True)
    with warned() as texts:
        model = TorchDDP(net)
        handle = gradwire.attach(model, spec)
        handle.load_state_dict(states, resize=True) if resize else handle.load_state_dict(states[rank])
        step = handle.state_dict()["step"]
        again = pickle.loads(pickle.dumps(handle.state_dict()))
        backward(model, rank, 4)
        trained = set(handle.state_dict()["parameters"])
        handle.load_state_dict(again)
        handle.swap("none")
        came = backward(model, rank, 5, scale=0)
        after = backward(model, rank, 6)
    handle.close()
    return owed, came, after, backward(TorchDDP(net), rank, 6), step, trained, texts


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1", "int8:error_feedback=1"])
def test_as_the_warning_says_a_model_that_is_wrapped_anew_takes_the_state_of_fewer_parameters(ranks, spec, resize):
    for owed, came, after, exact, step, trained, messages in ranks.run(wrapped_anew, 2, spec, resize):
        assert owed.keys() == {"1.weight", "1.bias"}
        assert owed["1.weight"].any()
        torch.testing.assert_close({name: came[name] for name in owed}, owed, rtol=1e-5, atol=1e-7)
        assert not came["0.weight"].any()
        torch.testing.assert_close(after, exact, rtol=0, atol=0)
        assert step == 3
        assert "0.weight" in trained
        assert not messages
