"""Every kind of optimizer in every wrapper: trains as without compression, saves, and resumes to the bit."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..torch_versions import fsdp_of_others, replicate_of_fsdp

STEPS, SAVED_AT, EVERY = 6, 3, 2  # a save between two rounds of local SGD
LOW_RANK = "powersgd:rank=4,min_compression_rate=1"
TOLERANCES = {"int8": 0.02, LOW_RANK: 0.2}  # by compressor, of the fall of the loss


class Polar(torch.optim.Optimizer):
    """A second optimizer that makes all singular values of a matrix equal, by a decomposition in place of an iteration."""

    def __init__(self, matrices, lr):
        super().__init__(matrices, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                momentum.mul_(group["momentum"]).add_(each.grad)
                left, _, right = torch.linalg.svd(whole(momentum), full_matrices=False)
                each.sub_(alike(left @ right, each), alpha=group["lr"])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alike(tensor, other):
    """The same tensor, sharded as another one is."""
    return distribute_tensor(tensor, other.device_mesh, other.placements) if isinstance(other, DTensor) else tensor


def beside_adamw(kind):
    """Optimizers of matrices by `kind`, and of vectors by AdamW."""

    def made(model):
        matrices, vectors = (
            [each for each in model.parameters() if (each.ndim > 1) == wanted] for wanted in (True, False)
        )
        return [kind(matrices, 0.05), torch.optim.AdamW(vectors, 0.01)]

    return made


OPTIMIZERS = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), 0.01)],
    "Polar and AdamW": beside_adamw(Polar),
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["Muon and AdamW"] = beside_adamw(torch.optim.Muon)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))


def loss_of(model, rank, step):
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * rank + step))
    return (model(inputs) - inputs[:, :8]).square().mean()


def own(model, spec):
    return gradwire.DistributedDataParallel(model, compressor=spec)


def by_parts(wrap):
    """What wraps both layers and the rest, each for itself."""

    def wrapped(model, spec):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("ranks",))
        for part in (model[0], model[2], model):
            wrap(part, mesh=mesh)
        return model

    return wrapped


def replicate(model, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate as torchs  # since torch 2.10

    torchs(model, mesh=mesh)


def overlapped(model, optimizers, spec):
    gradwire.overlap(model, optimizers, order="priority", per_parameter=True)
    return model.compression


def local(model, optimizers, spec):
    options = {"outer": "average", "compressor": spec, "fragments": 1, "overlap": False}
    return gradwire.LocalSteps(model, optimizers, every=EVERY, **options)


def attached(model, optimizers, spec):
    return gradwire.attach(model, spec, optimizer=optimizers)


WRAPPERS = {  # what wraps a model, and what then gives the handle
    "torch's DDP": (lambda model, spec: TorchDDP(model), attached),
    "own DDP": (own, lambda model, optimizers, spec: model.compression),
    "overlap": (own, overlapped),
    "LocalSteps": (lambda model, spec: model, local),
}
NEWER = {  # the same, of a newer torch
    "replicate": (by_parts(replicate), attached),
    "FSDP2": (
        by_parts(fully_shard),
        lambda model, optimizers, spec: gradwire.attach(model, gather="none", reduce=spec),
    ),
}


class Training:
    """A model, its optimizers and its handle."""

    def __init__(self, wrapper, optimizer, spec):
        wrap, handle_of = (WRAPPERS | NEWER)[wrapper]
        self.model = wrap(network(), spec)
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.handle = handle_of(self.model, self.optimizers, spec)

    def train(self, rank, first, last):
        for step in range(first, last):
            loss_of(self.model, rank, step).backward()
            for each in self.optimizers:
                each.step()
                each.zero_grad()
        if hasattr(self.optimizers[0], "drain"):
            self.optimizers[0].drain()

    @property
    def parts(self):
        return [self.model, *self.optimizers, self.handle]

    def saved(self):
        return [copy.deepcopy(each.state_dict()) for each in self.parts]

    def load(self, states):
        for each, state in zip(self.parts, states, strict=True):
            each.load_state_dict(state)

    def ended(self):
        """The loss of the whole model, and its parameters."""
        found = [whole(each.detach()).clone() for each in self.model.parameters()]
        self.handle.close()
        return found


@cache
def uncompressed(optimizer, local_steps):
    """The parameters of two ranks in this process: gradients are averaged at each step, or models at some."""
    models = [network() for _ in range(2)]
    optimizers = [OPTIMIZERS[optimizer](model) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss_of(model, rank, step).backward()
        pairs = list(zip(*(model.parameters() for model in models), strict=True))
        if not local_steps:
            for pair in pairs:
                pair[0].grad = (pair[0].grad + pair[1].grad) / 2
                pair[1].grad = pair[0].grad.clone()
        for each in (each for of_one in optimizers for each in of_one):
            each.step()
            each.zero_grad()
        if local_steps and (step + 1) % EVERY == 0:
            for pair in pairs:
                mean = (pair[0].detach() + pair[1].detach()) / 2
                pair[0].data, pair[1].data = mean, mean.clone()
    return [each.detach() for each in models[0].parameters()]


def cell(rank, wrapper, optimizer, spec):
    """The parameters of a training, and of one that was resumed."""
    training = Training(wrapper, optimizer, spec)
    training.train(rank, 0, SAVED_AT)
    states = training.saved()
    training.train(rank, SAVED_AT, STEPS)
    resumed = Training(wrapper, optimizer, spec)
    resumed.load(states)
    resumed.train(rank, SAVED_AT, STEPS)
    return training.ended(), resumed.ended()


def cells(rank, world_size, wrapper):
    """All optimizers with `int8`, and one with a compressor that has more to save, where whole matrices are sent."""
    pairs = [(optimizer, "int8") for optimizer in OPTIMIZERS]
    pairs += [("AdamW", LOW_RANK)] if wrapper != "FSDP2" else []
    return {pair: cell(rank, wrapper, *pair) for pair in pairs}


def mean_loss(parameters):
    model = network()
    with torch.no_grad():
        for mine, given in zip(model.parameters(), parameters, strict=True):
            mine.copy_(given)
        return sum(float(loss_of(model, rank, step)) for rank in range(2) for step in range(STEPS)) / (2 * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapper",
    [*WRAPPERS, pytest.param("replicate", marks=replicate_of_fsdp), pytest.param("FSDP2", marks=fsdp_of_others)],
)
def test_every_optimizer_trains_as_without_compression_and_resumes_to_the_bit(ranks, wrapper):
    before = mean_loss([each.detach() for each in network().parameters()])
    for answers in ranks.run(cells, 2, wrapper):
        for (optimizer, spec), (trained, resumed) in answers.items():
            where, exact = f"{optimizer}, {spec}", uncompressed(optimizer, wrapper == "LocalSteps")
            torch.testing.assert_close(resumed, trained, rtol=0, atol=0, msg=where)
            assert not all(map(torch.equal, trained, exact)), f"{where}: nothing was compressed"
            fall = before - mean_loss(exact)
            assert fall > 0.2 * before, where
            assert abs(mean_loss(trained) - mean_loss(exact)) < TOLERANCES[spec] * fall, where
