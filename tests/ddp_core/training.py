"""Training of the models in nets, on ranks and alone."""

from contextlib import nullcontext

from .nets import Batch, descend, loss_of


def train(model, rank, settings, zeros=0):
    """Parameters and last gradients; `zeros`: so many steps first in which all gradients are zero, while buckets change."""
    for step in range(-zeros, settings.steps):
        model.zero_grad(set_to_none=settings.set_to_none)
        for micro_batch in range(settings.micro_batches):
            last = micro_batch == settings.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model(Batch.drawn(rank, step, micro_batch)))
                (loss if step >= 0 else loss * 0).backward()
        descend(model)
    return [p.detach().clone() for p in model.parameters()], [p.grad for p in model.parameters()]


def train_alone(net, world_size, settings):
    """The same training in one process on the batches of all ranks."""
    for step in range(settings.steps):
        net.zero_grad()
        for rank in range(world_size):
            for micro_batch in range(settings.micro_batches):
                (loss_of(net(Batch.drawn(rank, step, micro_batch))) / world_size).backward()
        descend(net)
    return [parameter.detach() for parameter in net.parameters()]
