"""Methods for buckets: as exact as there is time for, against all that could be chosen."""

import itertools
import random

import pytest

from gradwire.ddp_core.averaging.exactness import Graded, most_exact


def seconds_of(buckets, computation, methods):
    """Of a step that waits for buckets sent one after the other."""
    free = 0.0
    for bucket, method in zip(buckets, methods, strict=True):
        free = max(free, bucket.ready) + bucket.seconds[method]
    return max(computation, free)


def drawn(seed):
    """A few buckets, the last ready at the end of computation; with odd seeds a less exact method may be slower."""
    generator = random.Random(seed)
    count = generator.randint(1, 5)
    ready = sorted(generator.uniform(0, 10) for _ in range(count))
    seconds = [[generator.uniform(0, 4) for _ in range(3)] for _ in ready]
    ordered = seconds if seed % 2 else [sorted(each, reverse=True) for each in seconds]
    rows = zip(ready, ordered, strict=True)
    return [Graded(at, tuple(each), generator.randrange(3)) for at, each in rows], ready[-1]


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5])
def test_steps_are_within_the_budget_or_the_quickest_uniform_choice_and_nothing_more_exact_would_be(budget):
    for seed in range(200):
        buckets, computation = drawn(seed)
        found = most_exact(buckets, computation, budget)
        uniform = [[min(method, bucket.worst) for bucket in buckets] for method in range(3)]
        quickest = min(seconds_of(buckets, computation, each) for each in uniform)
        limit = max(computation * (1 + budget), quickest) + 1e-9
        assert seconds_of(buckets, computation, found) <= limit
        assert all(method <= bucket.worst for bucket, method in zip(buckets, found, strict=True))
        for place, method in enumerate(found if seed % 2 == 0 else ()):
            better = [*found[:place], method - 1, *found[place + 1 :]]
            assert method == 0 or seconds_of(buckets, computation, better) > limit - 2e-9


def test_what_hides_is_sent_exactly_and_nothing_else_where_the_link_is_slow():
    fast = [Graded(at, (1.0, 0.5, 0.25), 2) for at in (1.0, 2.0, 3.0)]
    assert most_exact(fast, 3.0, 0.4) == [0, 0, 0]
    assert most_exact(fast, 3.0, 0.0) == [0, 0, 2]
    slow = [Graded(at, (40.0, 20.0, 10.0), 2) for at in (1.0, 2.0, 3.0)]
    assert most_exact(slow, 3.0, 0.02) == [2, 2, 2]


def test_all_buckets_get_a_step_before_any_gets_two():
    buckets = [Graded(10.0, (4.0, 2.0, 1.0), 2)] * 3
    limits = {method: seconds_of(buckets, 10.0, [method] * 3) / 10 - 1 for method in range(3)}
    for method, budget in limits.items():
        assert most_exact(buckets, 10.0, budget + 1e-9) == [method] * 3


def test_a_method_that_computes_longer_than_it_saves_is_not_taken():
    assert most_exact([Graded(1.0, (1.0, 3.0), 1)], 1.0, 0.0) == [0]


def test_never_less_exact_than_is_good_enough():
    buckets = [Graded(1.0, (9.0, 5.0, 1.0), worst) for worst in (0, 1, 2)]
    assert most_exact(buckets, 1.0, 0.0) == [0, 1, 2]
    assert all(
        method <= bucket.worst
        for budget in itertools.takewhile(lambda each: each < 5, itertools.count(0.0, 0.5))
        for method, bucket in zip(most_exact(buckets, 1.0, budget), buckets, strict=True)
    )
