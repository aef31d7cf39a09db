"""Sites that average once in so many seconds make as many steps in between as they can."""

from types import SimpleNamespace

import pytest

from gradwire.hooks.local_sgd import local_steps

from .sites import built, descend


@pytest.fixture
def clock(monkeypatch):
    """One that each step of training moves on."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(local_steps, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


@pytest.mark.parametrize(("seconds", "spacing"), [(0.5, 8), (1.0, 4), (3.0, 1), (30.0, 1)])
def test_a_fast_site_makes_more_steps_between_two_averages_than_a_slow_one(places, clock, seconds, spacing):
    model, optimizer, local = built(0, places(1), every=6, every_seconds=8.0, overlap=False)
    turns = []
    for step in range(3 + 3 * spacing):
        clock.now += seconds
        descend(model, optimizer, 0, step)
        turns += [local.steps] * (local.round > len(turns))
    assert turns == [3 + turn * spacing for turn in range(4)]  # the first by `every`
    assert local.delay == 0
    assert local.spacing == spacing
    local.close()


def test_a_training_that_resumes_finds_its_speed_from_its_own_steps(places, clock):
    def begun():
        return built(0, places(1, prefix=f"a training of {clock.now} s"), fragments=1, every_seconds=8.0)

    def train(steps):
        for step in range(steps):
            clock.now += 1.0
            descend(model, optimizer, 0, step)
        return local.spacing

    model, optimizer, local = begun()
    assert train(40) == 8
    saved = local.state_dict()
    local.close()
    model, optimizer, local = begun()
    local.load_state_dict(saved)
    assert train(4) == 8
    local.load_state_dict(saved)  # after a spike of the loss
    assert train(8) == 8
    local.close()
