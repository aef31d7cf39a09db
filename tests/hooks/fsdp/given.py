"""FSDP2 models on ranks: some to train, and one whose gradients are given; what they end with."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..given import Given

SHAPES = (((40, 7), (5,)), ((33, 3), (2, 2, 2)))  # of the parameters of two modules; most rows need padding


def mesh_of(world_size):
    return init_device_mesh("cpu", (world_size,))


def network(world_size, mesh=None, **options):
    """Three sharded modules, the root among them, with sizes that no number of ranks divides."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(33, 20), nn.ReLU())
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), inner, nn.Linear(20, 5))
    mesh = mesh or mesh_of(world_size)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    return model


def trained(model, rank, steps=4, first=0, optimizer=None):
    """The whole parameters after some steps, exact."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + steps):
        inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(100 * rank + step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def whole(model):
    """{name: whole parameter} of the exact shards. A collective call."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


class GivenParts(nn.Module):
    """Two modules of given gradients."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.parts = nn.ModuleList([Given(each) for each in shapes])

    def forward(self, gradients):
        return sum(part(each) for part, each in zip(self.parts, gradients, strict=True))


def given_model(world_size=None, mesh=None, **options):
    model, mesh = GivenParts(), mesh or mesh_of(world_size)
    for part in model.parts:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def divided(model):
    for module in (model[0], model[2], model):
        module.set_gradient_divide_factor(7.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it adds up
    return model


def seen_by_a_hook(model):
    """The gradients of a weight, each as a hook reads it as soon as it is there."""
    seen = []
    model.get_parameter("0.weight").register_post_accumulate_grad_hook(
        lambda each: seen.append(each.grad.full_tensor().clone())
    )
    return seen


def gradients(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [[torch.randn(shape, generator=generator) for shape in part] for part in shapes]


def mean_gradients(model, given):
    """What a step makes of given gradients: {name: whole gradient}."""
    model(given).backward()
    means = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return means


class Look(torch.autograd.Function):
    """Nothing to the numbers; notes the weights that a module has in backward."""

    @staticmethod
    def forward(ctx, inputs, module):
        ctx.module = module
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.module.note(ctx.module.in_backward)
        return grad, None


class Shows(nn.Module):
    """A module that keeps the weights it computes with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(70, 9))
        self.bias = nn.Parameter(torch.randn(11))
        self.in_forward, self.in_backward = [], []

    def note(self, into):
        into.append([self.weight.detach().clone().float(), self.bias.detach().clone().float()])

    def forward(self, inputs):
        self.note(self.in_forward)
        outputs = (inputs * self.weight).square().sum() + self.bias.sin().sum()
        return Look.apply(outputs, self)
