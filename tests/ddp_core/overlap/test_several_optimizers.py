"""Several optimizers of one overlapped model, as Muon for matrices and AdamW for the rest: each loop gives its own bits."""

import pickle

import pytest
import torch
from torch import nn

import gradwire

from ..errors import message_of
from .overlapped import SLICE_MB, STEPS, Layers, equal, slow


class Several:
    """A model and two optimizers, overlapped unless `order` is None."""

    def __init__(self, rank, order):
        torch.manual_seed(0)
        self.generator = torch.Generator().manual_seed(rank)
        self.model = gradwire.DistributedDataParallel(Layers(), compressor="none", transport=slow)
        matrices, others = ([each for each in self.model.parameters() if each.ndim == axes] for axes in (2, 1))
        first = torch.optim.Muon if hasattr(torch.optim, "Muon") else torch.optim.Adafactor
        self.optimizers = [first(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]
        if order:
            assert gradwire.overlap(self.model, self.optimizers, order=order, slice_mb=SLICE_MB) is self.optimizers
        self.overlapped = False

    def backward(self):
        self.model(torch.randn(4, 16, generator=self.generator)).square().mean().backward()
        self.overlapped |= self.model._overlap is not None and self.model._overlap.pending

    def end(self):
        states = [each.state_dict()["state"] for each in self.optimizers]
        found = [state[key][field] for state in states for key in sorted(state) for field in sorted(state[key])]
        found += [each.detach() for each in self.model.parameters()]
        self.model.compression.close()
        return [each.clone() for each in found if isinstance(each, torch.Tensor)]


def one_after_the_other(several, step):
    for each in several.optimizers:
        each.zero_grad()
    several.backward()
    for each in several.optimizers:
        each.step()


def each_clears_after_its_step(several, step):
    several.backward()
    for each in several.optimizers:
        each.step()
        each.zero_grad()


def the_last_one_first(several, step):
    several.optimizers.reverse()
    one_after_the_other(several, step)
    several.optimizers.reverse()


def one_steps_less_often(several, step):
    several.backward()
    several.optimizers[0].step()
    several.optimizers[0].zero_grad()
    if step % 2:
        several.optimizers[1].step()
        several.optimizers[1].zero_grad()


def read_in_between(several, step):
    several.backward()
    several.optimizers[0].step()
    several.seen = next(several.model.parameters()).sum().item()
    several.optimizers[1].step()
    several.model.zero_grad()


def cleared_in_between(several, step):
    several.backward()
    several.optimizers[step % 2].step()
    several.model.zero_grad()
    several.optimizers[1 - step % 2].step()


def twice_in_a_row(several, step):
    several.backward()
    for each in (*several.optimizers, several.optimizers[0]):
        each.step()
    several.model.zero_grad()


def rates_change(several, step):
    one_after_the_other(several, step)
    for place, each in enumerate(several.optimizers):
        each.param_groups[0]["lr"] *= 0.5 + 0.1 * place


def both(rank, world_size, loop):
    """The ends of a loop without overlap and with it, and whether anything was under way."""
    ends = []
    for order in (None, "priority"):
        several = Several(rank, order)
        for step in range(STEPS):
            loop(several, step)
        ends.append(several.end())
    return equal(*ends), several.overlapped


@pytest.mark.filterwarnings("ignore:.*reads parameters or gradients", "ignore:.*averaged and then cleared")
@pytest.mark.parametrize(
    "loop",
    [
        one_after_the_other,
        each_clears_after_its_step,
        the_last_one_first,
        one_steps_less_often,
        read_in_between,
        cleared_in_between,
        twice_in_a_row,
        rates_change,
    ],
)
def test_a_loop_of_two_optimizers_is_the_same_with_overlap(ranks, loop):
    assert ranks.run(both, 2, loop) == [(True, True)] * 2


def asked(rank, world_size):
    """What each of two optimizers answers, and the errors of a second call and of an optimizer of another model."""
    several, errors = Several(rank, "priority"), []
    for optimizers in (several.optimizers, [], [torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)]):
        errors.append(message_of(gradwire.overlap, gradwire.DistributedDataParallel(Layers()), optimizers))
    one_after_the_other(several, 0)
    for each in several.optimizers:
        each.drain()
    pending = several.model._overlap.pending
    orders = {each.report().order for each in several.optimizers}
    copies = [type(pickle.loads(pickle.dumps(each))).__mro__[0] for each in several.optimizers]
    several.end()
    return pending, orders, [each.__module__.startswith("torch.optim") for each in copies], errors


def test_each_drains_and_reports_and_what_cannot_be_is_refused(ranks):
    for pending, orders, plain, errors in ranks.run(asked, 2):
        assert not pending
        assert orders == {"backward"}  # until there is a plan
        assert plain == [True, True]
        for text, expected in zip(errors, ("overlapped already", "got none", "none of the model's"), strict=True):
            assert expected in text
