"""Orders and bounds against every order there is, closed forms, and pieces cut into unit slots."""

import itertools
import random
from math import inf

import pytest

from gradwire.ddp_core.measure.link_schedule import (
    arrivals,
    backward_order,
    optimal,
    priority_order,
    step_seconds,
    synchronous,
)
from gradwire.ddp_core.measure.step_model import Piece, StepModel
from gradwire.experiments.workloads.emulation.step_model import layered

SEEDS = range(20)


def random_model(seed, pieces=5, longest=6):
    """Whole seconds, so that unit slots are exact; needs and ready times in no particular order."""
    draw = random.Random(seed).randrange
    forward, backward = draw(1, 12), draw(1, 12)
    return StepModel(
        forward, backward, tuple(Piece(draw(backward + 1), draw(longest), draw(forward + 1)) for _ in range(pieces))
    )


def random_layers(seed, count=6):
    draw = random.Random(seed).uniform
    return [(draw(0, 1), draw(0, 2), draw(0, 3)) for _ in range(count)]


def played(model, order, tick=1 / 8):
    """The step by a clock that ticks: a link that carries, and a forward that stops where it wants what is not there."""
    left = {index: piece.wire for index, piece in enumerate(model.pieces)}
    queue, now, done = list(order), 0.0, 0.0
    while queue or done < model.forward:
        while queue and not left[queue[0]] and model.pieces[queue[0]].ready <= now:
            queue.pop(0)
        missing = [model.pieces[index].needed for index in queue]
        if now >= model.backward and min(missing, default=inf) > done and done < model.forward:
            done += tick
        elif not queue and done >= model.forward:
            break
        if queue and model.pieces[queue[0]].ready <= now:
            left[queue[0]] -= tick
        now += tick
    return now


def unit_slots(model):
    """The same model, its pieces cut into pieces of a second."""
    units = (Piece(p.ready, 1, p.needed) for p in model.pieces for _ in range(int(p.wire)))
    return StepModel(model.forward, model.backward, tuple(units))


def step_in(model, order):
    return step_seconds(model, arrivals(model, order))


def shortest(model):
    """By trying every order."""
    return min(step_in(model, order) for order in itertools.permutations(range(len(model.pieces))))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_in_an_order_is_what_a_ticking_clock_says(seed):
    model = random_model(seed)
    order = random.Random(seed).sample(range(5), 5)
    assert step_in(model, order) == played(model, order)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_beats_the_bound_and_unit_slots_reach_it(seed):
    model = random_model(seed, pieces=4, longest=3)
    units = unit_slots(model)
    assert optimal(model) <= shortest(model)
    assert optimal(model) == optimal(units) == step_in(units, priority_order(units))
    if len(units.pieces) <= 7:
        assert optimal(model) == shortest(units)


@pytest.mark.parametrize("seed", SEEDS)
def test_planned_orders_are_a_piece_from_the_bound_at_most(seed):
    model = random_model(seed)
    planned = step_in(model, priority_order(model))
    assert optimal(model) <= shortest(model) <= planned <= optimal(model) + max(p.wire for p in model.pieces)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_shortens_a_synchronous_step_and_without_a_new_order_nothing_is_gained(seed):
    model = layered(random_layers(seed, count=5))
    ends = min(max(arrivals(model, order)) for order in itertools.permutations(range(5)))
    assert synchronous(model) == pytest.approx(model.forward + max(model.backward, ends))
    kept = step_in(model, backward_order(model))
    assert optimal(model) - 1e-9 <= kept <= synchronous(model) + 1e-9
    if synchronous(model) > model.computation:  # the first layer arrives last
        assert kept == pytest.approx(synchronous(model))


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 1, 2], [1, 2]])
def test_an_order_that_leaves_out_or_repeats_is_refused(order):
    with pytest.raises(ValueError, match="each of the 2 pieces once"):
        arrivals(layered([(1, 1, 1), (1, 1, 1)]), order)


@pytest.mark.parametrize("bad", [-1.0, inf, float("nan")])
def test_what_is_no_time_is_refused(bad):
    with pytest.raises(ValueError, match="seconds, at least 0"):
        Piece(0.0, bad, 0.0)
    with pytest.raises(ValueError, match="within backward"):
        StepModel(1.0, 1.0, (Piece(2.0, 1.0, 0.0),))
