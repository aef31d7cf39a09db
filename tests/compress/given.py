"""What the tests of compressors start from: layouts, gradients, and a compressor whose output tells who ran."""

from dataclasses import dataclass, replace

import numpy
import torch

from gradwire.compress import Layout, Ranks, Simulation, all_reduce, compressor
from gradwire.compress.state import tree as states

RANKS = 2


def layout(*shapes, dtype=torch.float32, names=None, world_size=RANKS, per_host=1):
    names = names or tuple(f"p{index}" for index in range(len(shapes)))
    return Layout(tuple(names), shapes, dtype, torch.device("cpu"), Ranks(world_size, per_host=per_host))


def placed(within, **changes):
    """The layout among other ranks."""
    return replace(within, ranks=replace(within.ranks, **changes))


def gradients(within, seed=0):
    """A standard normal flat gradient for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(within.numel, generator=generator).to(within.dtype) for _ in range(within.ranks.world_size)]


def mean(tensors):
    return (torch.stack([tensor.double() for tensor in tensors]).sum(0) / len(tensors)).float()


@dataclass(frozen=True)
class Scaled:
    """Sends a part of the gradient and holds the rest back, exactly."""

    part: float

    def init(self, layout):
        return None

    def reduce(self, grad, state, residual=None):
        total = grad if residual is None else torch.add(residual.before, grad, out=residual.after)
        sent = total * self.part
        if residual is not None:
            residual.after.sub_(sent)
        return (yield from all_reduce(sent))


def assert_goes_on_after_a_load(built, within, steps=3, more=1):
    """A state that was saved and loaded gives the bits of one that never was, for some more steps."""
    whole, resumed = Simulation(built, within), Simulation(built, within)
    for step in range(steps):
        whole.step(gradients(within, step))
    for before, after in zip(whole.states, resumed.states, strict=True):
        assert states.load(after, states.save(before)) == {}
        states.set_step(after, steps)
    for step in range(steps, steps + more):
        given = gradients(within, step)
        assert all(map(torch.equal, whole.step(given), resumed.step(given)))
    return resumed


def assert_steps_of(spec, within, sent_of, feedback, atol=1e-14):
    """Each step sends what `sent_of` says of all ranks' sums and gradients, and with feedback holds back the rest."""
    simulation = Simulation(compressor(f"{spec},error_feedback={int(feedback)}"), within)
    held = [numpy.zeros(within.numel) for _ in range(within.ranks.world_size)]
    for step in range(5):
        given = [each.numpy() for each in gradients(within, step)]
        values = [g + h for g, h in zip(given, held, strict=True)]
        sent = sent_of(values, given, step)
        held = [(v - s) * feedback for v, s in zip(values, sent, strict=True)]
        for output in simulation.step(gradients(within, step)):
            assert numpy.allclose(output.numpy(), numpy.mean(sent, axis=0), atol=atol)
        if feedback:
            assert numpy.allclose([state.residual.flat.numpy() for state in simulation.states], held, atol=atol)
