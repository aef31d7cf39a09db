"""Another thread saves local steps while the site trains: it changes nothing, and gets what a save between steps gets."""

import copy
import threading
from datetime import timedelta

import pytest
import torch

from gradwire.ddp_core.transport.protocol import Decorated

from ...ddp_core.errors import message_of
from ..given import same
from ..saving import Busy
from . import sites
from .sites import descend

STEPS, EVERY = 16, 4
CASES = [  # fragments, overlap
    (1, True),
    (2, True),
    (2, False),
]


class Gate:
    """A decorator of transports: while it is shut, requests wait until it opens."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()

    def __call__(self, transport):
        return Gated(transport, self)


class Gated(Decorated):
    def __init__(self, inner, gate):
        super().__init__(inner)
        self._gate = gate

    def start(self, request, channel):
        assert self._gate.open.wait(60)
        return self.inner.start(request, channel)


def built(rank, fragments, overlap, gate=None, momentum=0.9):
    options = {"every": EVERY, "fragments": fragments, "overlap": overlap, "timeout": timedelta(seconds=40)}
    return sites.built(0, momentum=momentum, transport=gate, compressor="topk:ratio=0.3", **options)


def ended(model, local):
    local.finish()
    return [parameter.detach().clone() for parameter in model.parameters()], local.round


def saved(local):
    """The state of local steps without the identity of the training, which each training has of its own."""
    return {**local.state_dict(), "training": ""}


def quietly(rank, fragments, overlap):
    """The model at the end, and without an effect on it the state after each step."""
    model, optimizer, local = built(rank, fragments, overlap)
    states = {0: saved(local)}
    for step in range(STEPS):
        descend(model, optimizer, rank, step)
        states[step + 1] = saved(local)
    return ended(model, local), states


def saved_often(rank, world_size, fragments, overlap):
    model, optimizer, local = built(rank, fragments, overlap)
    thread = Busy(lambda: saved(local))
    thread.start()
    for step in range(STEPS):
        descend(model, optimizer, rank, step)
        if step % 3 == rank:
            thread.once_more()
    taken = thread.stop()
    found, (expected, states) = ended(model, local), quietly(rank, fragments, overlap)
    assert thread.error is None, thread.error
    alike = [same(state, states[state["steps"]]) for state in taken]
    return same(found, expected), all(alike), len({state["steps"] for state in taken})


@pytest.mark.parametrize(("fragments", "overlap"), CASES)
def test_a_thread_that_saves_again_and_again_changes_no_bit_and_gets_what_a_save_between_steps_gets(
    ranks, fragments, overlap
):
    for trained_alike, saved_alike, different in ranks.run(saved_often, 2, fragments, overlap):
        assert trained_alike
        assert saved_alike
        assert different > 2


def saved_in_a_round(rank, world_size, fragments):
    """The same with one save that begins while a round is on its way, and a turn that comes before the round's end."""
    gate = Gate()
    model, optimizer, local = built(rank, fragments, True, gate)
    taken = []
    for step in range(STEPS):
        if step == 7:
            local.state_dict()  # the round before has ended
            gate.open.clear()  # until that which step 7 begins is on its way
        descend(model, optimizer, rank, step)
        if step == 7:
            thread = threading.Thread(target=lambda: taken.append(saved(local)))
            thread.start()
        if step == 7 + EVERY // fragments - 1:
            threading.Timer(0.3, gate.open.set).start()  # while the next turn waits for the round
    thread.join()
    found, (expected, states) = ended(model, local), quietly(rank, fragments, True)
    (state,) = taken
    return same(found, expected), same(state, states[state["steps"]])


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_save_beside_a_round_waits_for_it_and_leaves_it_to_training(ranks, fragments):
    assert ranks.run(saved_in_a_round, 2, fragments) == [(True, True)] * 2


class Fails(Decorated):
    """No request starts."""

    def start(self, request, channel):
        raise RuntimeError("on purpose")


def failing(rank, world_size):
    """What saves beside a round raise that fails, and what training raises then."""
    model, optimizer, local = built(rank, 1, True, Fails)
    for step in range(EVERY):
        descend(model, optimizer, rank, step)

    def train():
        for step in range(EVERY):
            descend(model, optimizer, rank, step)

    told = [message_of(call) for call in (local.state_dict, local.state_dict, train)]
    local.close()
    return told


def test_a_save_beside_a_round_that_fails_raises_and_so_does_training(ranks):
    for told in ranks.run(failing, 2):
        assert len(told) == 3
        assert all("on purpose" in message for message in told)


def replaced(rank, world_size):
    """Models of a site whose numbers are not finite once: without, with a save before the next turn, and resumed from it."""
    found = []
    for kind in ("quiet", "saved", "resumed"):
        model, optimizer, local = built(rank, 1, True, momentum=0.0)
        for step in range(6):
            if step == 3 and rank == 1:
                with torch.no_grad():
                    model.last.bias.fill_(torch.nan)
            descend(model, optimizer, rank, step)
        if kind != "quiet":
            saved = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, local)]
            assert saved[-1]["replaced"] == (rank == 1)
        if kind == "resumed":
            local.close()
            model, optimizer, local = built(rank, 1, True, momentum=0.0)
            for each, state in zip((model, optimizer, local), saved, strict=True):
                each.load_state_dict(state)
        for step in range(6, 10):
            descend(model, optimizer, rank, step)
        found.append(ended(model, local))
    assert all(weight.isfinite().all() for weight in found[0][0])
    return same(found[0], found[1]), same(found[0], found[2])


def test_a_save_leaves_it_to_training_to_take_the_others_model_over(ranks):
    assert ranks.run(replaced, 2) == [(True, True)] * 2
