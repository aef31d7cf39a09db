"""What torch.compile and frameworks put around a model changes neither its state nor what attach finds."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import compressed, same


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 32), nn.Sequential(nn.Linear(32, 24, bias=False)))


def compiled(module):
    return torch.compile(module, backend="eager", dynamic=False)


def partly_compiled():
    model = network()
    model[1] = compiled(model[1])
    return model


class FabricModule(nn.Module):
    """What Lightning Fabric puts around a DDP model."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = model
        self._original_module = model.module


BUILDS = {"plain": network, "compiled": lambda: compiled(network()), "a part": partly_compiled}


def trained(rank, world_size, kind):
    """For each way to compile, the gradients and the state after three steps, and what comes after loading another's."""

    def step_of(model, step):
        model.zero_grad()
        model(torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * rank + step))).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    answers, states = {}, {}
    for way in BUILDS:
        model, handle = compressed(kind, BUILDS[way](), "powersgd:rank=1")
        gradients = [step_of(model, step) for step in range(3)]
        states[way] = handle.state_dict()
        resumed, other = compressed(kind, BUILDS[way](), "powersgd:rank=1")
        old = {f"_orig_mod.{name}": fields for name, fields in states["plain"]["parameters"].items()}
        buckets = [[f"_orig_mod.{name}" for name in names] for names in states["plain"]["buckets"]]
        other.load_state_dict({**states["plain"], "parameters": old, "buckets": buckets})
        answers[way] = gradients, states[way]["parameters"], step_of(resumed, 3)
        handle.close()
        other.close()
    return answers


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_a_compiled_model_has_the_names_the_seeds_and_the_state_of_the_plain_one(ranks, kind):
    for answers in ranks.run(trained, 2, kind):
        assert set(answers["plain"][1]) == {"0.weight", "0.bias", "1.0.weight"}
        assert same(answers["plain"], answers["compiled"])
        assert same(answers["plain"], answers["a part"])


def found(rank, world_size):
    """The steps and the names of what is attached to."""
    ddp = [TorchDDP(network()) for _ in range(3)]
    wrapped = [compiled(ddp[0]), FabricModule(ddp[1]), compiled(FabricModule(ddp[2]))]
    steps = []
    for model, inner in zip(wrapped, ddp, strict=True):
        handle = gradwire.attach(model, "bf16")
        inner(torch.ones(4, 24)).sum().backward()
        steps.append((handle.stats().steps, sorted(handle.averager.names.values())))
        handle.close()
    return steps


def test_attach_finds_ddp_inside(ranks):
    assert ranks.run(found, 1) == [[(1, ["0.bias", "0.weight", "1.0.weight"])] * 3]
