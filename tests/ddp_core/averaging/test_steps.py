"""The steps of a handle beside other threads: who waits for what, and for how long."""

import threading
import time

import pytest

from gradwire.ddp_core.averaging import steps as module
from gradwire.ddp_core.averaging.steps import Phase, Steps
from gradwire.ddp_core.measure.step import Step


class Engines:
    """Engines that are idle, or have failed, when a test says so."""

    idle, failed, followed = True, False, 0

    @property
    def runs(self):
        return not self.idle

    def follow(self):
        self.followed += 1


class Memory:
    in_place, committed = True, 0

    def commit(self):
        self.committed += 1


class Averager:
    """An averager that counts the steps which it took part in."""

    def __init__(self, steps):
        self.engines, self.memory, self.step, self.inside, self.ended = Engines(), Memory(), Step(), False, 0
        steps.averagers.add(self)

    def step_is_over(self):
        self.ended += 1


@pytest.fixture
def steps():
    return Steps()


@pytest.fixture
def averager(steps):
    return Averager(steps)


def opened(steps, *averagers):
    steps.begin()
    for each in averagers:
        each.inside = True


class Elsewhere(threading.Thread):
    """Calls a function on another thread, and waits until that waits."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self._function, self.result = function, None
        self.start()
        self.join(0.2)

    def run(self):
        self.result = self._function(), threading.get_ident()

    def end(self):
        self.join(20)
        assert not self.is_alive()
        return self.result


def test_a_save_waits_for_no_step_that_overwrites_nothing_or_whose_engine_has_failed(steps, averager):
    opened(steps, averager)
    for attribute, value in (("memory", "in_place"), ("engines", "failed")):
        setattr(getattr(averager, attribute), value, attribute == "engines")
        Elsewhere(lambda: steps.snapshot(lambda: None)).end()
        averager.memory.in_place = True


def test_an_error_of_a_save_is_raised_where_it_was_asked_for(steps, averager):
    def save():
        raise ArithmeticError("on purpose")

    def told():
        with pytest.raises(ArithmeticError, match="on purpose"):
            steps.snapshot(save)
        return True

    opened(steps, averager)
    saver = Elsewhere(told)
    steps.end()
    assert saver.end()[0]


def test_a_step_whose_end_nobody_tells_is_over_when_all_was_sent_and_no_program_runs(steps, averager):
    opened(steps, averager)
    averager.engines.idle = False
    steps.all_sent()
    saver = Elsewhere(lambda: steps.snapshot(lambda: averager.inside))
    assert saver.is_alive()
    began = time.monotonic()
    averager.engines.idle = True
    steps.hear()
    inside, thread = saver.end()
    assert not inside
    assert thread != threading.get_ident()
    assert time.monotonic() - began < 5  # it does not wait for the step to break off
    assert (steps.phase, averager.ended) == (Phase.IDLE, 1)


def test_a_save_makes_no_changes_that_others_wait_for(steps, averager):
    opened(steps, averager)
    made = []
    Elsewhere(lambda: steps.between(lambda: made.append("change"))).end()
    steps.all_sent()
    Elsewhere(lambda: steps.snapshot(lambda: None)).end()
    assert made == []
    opened(steps, averager)
    assert made == ["change"]


def test_a_step_without_a_sign_broke_off_until_there_is_one(steps, averager, monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.3)
    opened(steps, averager)
    (inside, _), phase = Elsewhere(lambda: steps.snapshot(lambda: averager.inside)).end(), steps.phase
    assert inside
    assert phase is Phase.BROKEN
    monkeypatch.setattr(module, "QUIET", 60)
    Elsewhere(lambda: steps.snapshot(lambda: None)).end()  # nobody waits again for a step that broke off
    steps.hear()
    saver = Elsewhere(lambda: steps.snapshot(lambda: None))
    assert (saver.is_alive(), steps.phase) == (True, Phase.OPEN)
    steps.end()
    saver.end()


def test_programs_that_run_are_signs_of_a_step(steps, averager, monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.1)
    opened(steps, averager)
    averager.engines.idle = False
    saver = Elsewhere(lambda: steps.snapshot(lambda: None))
    saver.join(0.5)
    assert saver.is_alive()
    steps.end()
    saver.end()


def test_an_averager_that_is_gone_holds_no_steps_up():
    steps = Steps()
    opened(steps, Averager(steps))
    steps.all_sent()
    steps.between(lambda: None)
    assert steps.phase is Phase.IDLE


def test_a_change_does_not_overtake_those_that_wait_for_a_step_that_has_ended_unseen(steps, averager):
    made = []
    opened(steps, averager)
    averager.engines.idle = False
    steps.all_sent()
    Elsewhere(lambda: steps.between(lambda: made.append("first"))).end()
    assert made == []
    averager.engines.idle = True  # nobody tells that the step is over
    Elsewhere(lambda: steps.between(lambda: made.append("second"))).end()
    assert made == ["first", "second"]


def test_a_step_that_broke_off_is_committed_before_another_thread_saves(steps, averager):
    opened(steps, averager)
    saver = Elsewhere(lambda: steps.snapshot(lambda: (averager.inside, averager.memory.committed)))
    steps.begin()
    (_, committed), _ = saver.end()
    assert committed == 1
