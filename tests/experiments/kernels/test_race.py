from functools import partial

from gradwire.experiments.kernels.race import Racer, race


class Steps:
    """A clock that takes each work's word for its seconds, and writes down who ran."""

    cache_bytes = 0

    def __init__(self):
        self.ran = []

    def seconds(self, work):
        name, seconds = work()
        self.ran.append(name)
        return seconds


def test_racers_take_turns_and_the_slow_do_not_keep_the_fast_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gradwire.experiments.kernels.race.time.monotonic", lambda: now[0])

    def work(name, seconds):
        now[0] += seconds
        return name, seconds

    clock = Steps()
    speeds = {"slow": 1.0, "fast": 0.1}
    racers = {name: Racer(partial(work, name, each), ("reference",)) for name, each in speeds.items()}
    timings = race(racers, clock, repeats=7, seconds=0.45)
    assert {name: each.repeats for name, each in timings.items()} == {"slow": 3, "fast": 5}
    assert clock.ran == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "fast"]
    assert timings["slow"].median == 1.0
