"""A few fixed trials, of each kind; `make fuzz` runs more."""

import pytest

from . import draw, known
from .kinds import KINDS
from .run import outcome

TRAINING = (6, 23, 27, 34, 39, 42, 56, 83, 84, 112)  # 27: a step that is thrown away, a fork, a damaged state
FAILING = (14, 72, 21, 31)  # a rank that is stopped for a while; one that is killed; one that swaps, or loads, alone
OTHERS = [("overlap", 8), ("overlap", 1), ("hosts", 4), ("options", 1), ("local", 3), ("local", 8)]
OTHERS += [("shards", 0), ("shards", 14)]  # against torch's; and hybrid sharding that compresses


@pytest.mark.parametrize("seed", TRAINING)
def test_the_laws_hold_in_a_drawn_trial(ranks, seed):
    assert outcome(ranks, seed).found == []


@pytest.mark.parametrize("seed", FAILING)
def test_a_mishap_ends_in_errors_within_the_time_limit(ranks, seed):
    assert outcome(ranks, seed).found == []


@pytest.mark.parametrize(("kind", "seed"), OTHERS)
def test_the_laws_hold_in_trials_of_other_kinds(ranks, kind, seed):
    assert outcome(ranks, seed, kind=kind).found == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_trial_each_time(kind):
    drawn = KINDS[kind].drawn
    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]


def test_most_trials_are_not_known_to_fail():
    assert sum(bool(known.why(draw.drawn(seed))) for seed in range(200)) < 80
