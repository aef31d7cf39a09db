"""Link costs from samples: exact without noise, and little moved by collectives that took long for their own reasons."""

import random

import numpy as np
import pytest

from gradwire.ddp_core.measure.step_model import LinkCost

ALPHA, BETA = 3e-4, 8e-9
SIZES = [2.0**power for power in range(10, 26)]


def test_without_noise_a_fit_is_exact():
    found = LinkCost.fitted((size, ALPHA + BETA * size) for size in SIZES)
    assert (found.alpha, found.beta) == pytest.approx((ALPHA, BETA))


def test_few_slow_collectives_move_it_less_than_they_move_least_squares():
    draw = random.Random(1)
    samples = [(size, (ALPHA + BETA * size) * draw.uniform(0.97, 1.03)) for size in SIZES for _ in range(10)]
    samples = [(size, took * (10 if draw.random() < 0.1 else 1)) for size, took in samples]
    found = LinkCost.fitted(samples)
    slope, _ = np.polyfit(*np.array(samples).T, 1)
    assert found.beta == pytest.approx(BETA, rel=0.05)
    assert abs(found.beta - BETA) < abs(slope - BETA) / 5


def test_many_samples_are_thinned_and_order_does_not_matter():
    samples = [(size * (1 + k / 100), ALPHA + BETA * size * (1 + k / 100)) for size in SIZES for k in range(100)]
    shuffled = random.Random(2).sample(samples, len(samples))
    assert LinkCost.fitted(samples) == LinkCost.fitted(shuffled)
    assert LinkCost.fitted(samples).beta == pytest.approx(BETA)


def test_of_one_size_the_rate_is_the_median_and_nothing_is_negative():
    assert LinkCost.fitted([(100, 1.0), (100, 2.0), (100, 9.0)]) == LinkCost(0.0, 0.02)
    shrinking = LinkCost.fitted([(100, 2.0), (200, 1.0)])
    assert shrinking == LinkCost(1.5, 0.0)


def test_nothing_sent_cannot_be_fitted():
    with pytest.raises(ValueError, match="there are none"):
        LinkCost.fitted([(0, 1.0)])
