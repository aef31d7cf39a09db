"""A user's communication hook: what it is handed, and when it is called."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ...torch_versions import complex_numbers
from ..chain import SMALL, WIDTH, Chain
from ..layers import DYNAMIC, Layers, gradients_of, inputs_of
from ..nets import ALWAYS, Net, Settings, SparseRows, same
from ..training import train


def hooked_late(rank, world_size, ours, after_forward):
    """Gradients with a hook that is registered after a step, and after a forward or before one that is not synchronized."""
    model = gradwire.DistributedDataParallel(Chain(), **SMALL)
    inputs = torch.full((2, WIDTH), 1.0 + rank)
    model(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    output = model(inputs) if after_forward else None
    model.register_comm_hook(None, gradwire.comm_hook("none") if ours else default_hooks.allreduce_hook)
    if not after_forward:
        with model.no_sync():
            output = model(inputs)
        model.reducer.prepare_for_backward([output])
    output.sum().backward()
    return all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("after_forward", [True, False])
def test_a_hook_that_comes_late_gets_gradients_that_are_not_divided_yet(ranks, ours, after_forward):
    assert all(ranks.run(hooked_late, 2, ours, after_forward))


DENSE = tuple(part for part in ALWAYS if part is not SparseRows)


class Seen:
    """A communication hook that notes what it is handed and averages in a tensor of its own."""

    def __init__(self, model):
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.notes = []

    def __call__(self, state, bucket):
        self.notes.append(
            (bucket.index(), bucket.is_last(), [self.names[parameter] for parameter in bucket.parameters()])
        )
        parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
        assert all(part.shape == parameter.shape and same([part], [parameter.grad]) for parameter, part in parts)
        assert sum(part.numel() for part in bucket.gradients()) == bucket.buffer().numel()
        bucket.set_buffer(bucket.buffer().clone())
        assert all(same([part], [p.grad]) for p, part in zip(bucket.parameters(), bucket.gradients(), strict=True))
        return default_hooks.allreduce_hook(None, bucket)


def hooked(rank, world_size, view):
    """Parameters with a hook of the user's, and without one in torch's; what the hook was handed in the last step."""
    settings = Settings(steps=3)
    model = gradwire.DistributedDataParallel(Net(DENSE), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
    hook = Seen(model.module)
    model.register_comm_hook(None, hook)
    mine, gradients = train(model, rank, settings)
    expected, torch_s = train(TorchDDP(Net(DENSE), bucket_cap_mb=0.002), rank, settings)
    count = len(model.reducer.assignment.buckets)
    return same(mine, expected) and same(gradients, torch_s), hook.notes[-count:], len(hook.names)


@complex_numbers
@pytest.mark.parametrize("view", [False, True])
def test_a_communication_hook_sees_every_gradient_in_its_shape_in_buckets_in_order(ranks, view):
    for equal, notes, parameters in ranks.run(hooked, 2, view):
        assert equal
        assert [index for index, _, _ in notes] == list(range(len(notes)))
        assert [last for _, last, _ in notes] == [False] * (len(notes) - 1) + [True]
        names = [name for _, _, names in notes for name in names]
        assert len(set(names)) == len(names) == parameters - 1  # the frozen one


def hooked_dropping(rank, world_size):
    """The buckets that a user's hook is handed, when layers are dropped."""
    model = gradwire.DistributedDataParallel(Layers(), **DYNAMIC, skip_all_reduce_unused_params=True)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    model(inputs_of(rank), (3, 1)).square().sum().backward()
    return seen, [gradient is None for gradient in gradients_of(model)]


def test_a_communication_hook_is_not_called_for_a_bucket_that_no_rank_used(ranks):
    for seen, missing in ranks.run(hooked_dropping, 2):
        assert seen == [0, 2]
        assert missing == [True, True, False, False, True, True, False, False]
