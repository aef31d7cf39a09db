"""A stand-in for a device's clock: its seconds are not those of the host, and nobody may ask for them within steps."""

import time

FACTOR = 2.0  # seconds of the device in one of the host


class LateMark(float):
    """When the host took it; a device would not have come to it yet."""


class LateClock:
    """`looks`: whether a look is under way. `taken`: marks. `asked_too_early`: how often seconds were wanted in a step."""

    at_once = False

    def __init__(self, *, looks=False):
        self.looks, self.taken, self.asked_too_early = looks, 0, 0

    def now(self):
        self.taken += 1
        return LateMark(time.perf_counter())

    def took(self, mark):
        return isinstance(mark, LateMark)

    def seconds(self, since, until):
        assert self.took(since)
        assert self.took(until)
        self.asked_too_early += not self.looks
        return FACTOR * (float(until) - float(since))
