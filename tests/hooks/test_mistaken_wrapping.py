"""Models that are wrapped twice, and hooks that nobody calls: both would train without compression, and say so."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire import DistributedDataParallel as OwnDDP
from gradwire.hooks.torch_ddp import handle_for

from ..ddp_core.errors import warned


def network():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


class Within(nn.Module):
    """A network of which a part is another one."""

    def __init__(self, part):
        super().__init__()
        self.part, self.last = part, nn.Linear(2, 2)

    def forward(self, inputs):
        return self.last(self.part(inputs))


def step(model):
    model(torch.ones(3, 6)).sum().backward()


WRAPPED = {
    "torch's around ours": lambda: step(TorchDDP(OwnDDP(network(), compressor="bf16"))),
    "torch's around a model with ours": lambda: step(TorchDDP(Within(OwnDDP(network(), compressor="topk")))),
    "ours around torch's": lambda: OwnDDP(TorchDDP(network()), compressor="bf16"),
    "ours around ours": lambda: OwnDDP(Within(OwnDDP(network())), compressor="topk"),
    "torch's twice, attached": lambda: gradwire.attach(TorchDDP(TorchDDP(network())), "topk"),
}


def raised(rank, world_size, case):
    with pytest.raises(RuntimeError) as caught:
        WRAPPED[case]()
    return str(caught.value)


@pytest.mark.parametrize("case", WRAPPED)
def test_a_model_that_is_wrapped_twice_is_refused(ranks, case):
    (message,) = ranks.run(raised, 1, case)
    assert "is in a DistributedDataParallel twice" in message


def side_by_side(rank, world_size):
    """Ours within torch's, where each averages parameters of its own; gradients of both."""
    inner = OwnDDP(network())
    outer = Within(inner)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(
        outer, [f"part.{name}" for name, _ in inner.named_parameters()]
    )
    step(TorchDDP(outer))
    return all(parameter.grad is not None for parameter in outer.parameters())


def test_two_that_average_parameters_of_their_own_are_not(ranks):
    assert ranks.run(side_by_side, 1) == [True]


def by_module(model):
    return model.module


def by_itself(model):
    return model


def uncalled(rank, world_size, use, clear, attached):
    """The number of warnings of some steps."""
    model = TorchDDP(network())
    handle = gradwire.attach(model, "topk") if attached else handle_for("topk", model.module)
    with warned("is not called") as texts:
        for _ in range(6):
            step(use(model))
            if clear:
                model.zero_grad()
    handle.close()
    return len(texts)


@pytest.mark.parametrize(
    ("use", "clear", "attached", "count"),
    [
        (by_module, True, True, 1),
        (by_itself, True, False, 1),  # the hook was not registered
        (by_itself, True, True, 0),
        (by_module, False, True, 0),  # gradients of one step
    ],
)
def test_a_handle_that_nobody_calls_is_noticed_once(ranks, use, clear, attached, count):
    assert ranks.run(uncalled, 1, use, clear, attached) == [count]


def unsynced(rank, world_size):
    """The warnings of local SGD: every backward in no_sync(), as Accelerate's LocalSGD does it."""
    model = TorchDDP(network())
    gradwire.attach(model, "topk")
    with warned("is not called") as texts, model.no_sync():
        for _ in range(6):
            step(model)
            model.zero_grad()
    return texts


def test_a_handle_that_is_not_called_because_of_no_sync_names_that_and_local_steps(ranks):
    ((message,),) = ranks.run(unsynced, 1)
    assert "inside no_sync() alone" in message
    assert "gradwire.LocalSteps" in message
