"""Another thread saves, loads and swaps while training goes on."""

import functools
import threading
import time

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.ddp_core.averaging import steps

from .given import Given, average, gradients
from .saving import Saves
from .test_handle import same

SHAPES = ((64, 48), (48,), (32, 40), (5,))
SPECS = ["topk:ratio=0.05", "onebit", "powersgd:rank=2", "batched-powersgd"]
OPTIONS = {"bucket_cap_mb": 0.004}
STEPS = 12


def wrapped(spec, ours):
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, **OPTIONS)
        return model, model.compression
    model = TorchDDP(Given(SHAPES), **OPTIONS)
    return model, gradwire.attach(model, spec)


def step_of(model, rank, step):
    return average(model, gradients(rank, step, SHAPES))


class Busy(threading.Thread):
    """Calls a function again and again until it is stopped; keeps what it returned, and what it raised."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.results, self.error, self.over = function, [], None, False

    def run(self):
        try:
            while not self.over:
                self.results.append(self.function())
        except Exception as error:
            self.error = error

    def once_more(self):
        """Wait until it has begun a call from now on, and ended it."""
        calls = len(self.results) + 2
        while len(self.results) < calls and self.is_alive():
            time.sleep(0.001)

    def stop(self):
        self.over = True
        self.join()
        return self.results


def saved_meanwhile(rank, world_size, spec, ours):
    """Averages without and with a thread that saves; the state after each step; what the thread saved."""
    quiet, handle = wrapped(spec, ours)
    expected, states = [], {0: handle.state_dict()}
    for step in range(STEPS):
        expected.append(step_of(quiet, rank, step))
        states[step + 1] = handle.state_dict()
    handle.close()
    model, handle = wrapped(spec, ours)
    thread = Busy(handle.state_dict)
    thread.start()
    found = []
    for step in range(STEPS):
        found.append(step_of(model, rank, step))
        if step % 3 == 2:
            thread.once_more()
    saved = thread.stop()
    last = handle.state_dict()
    handle.close()
    assert thread.error is None, thread.error
    saved = [state for state in saved if state["step"] > 1]  # new buckets are met in steps 1 and 2: the fields move
    alike = [same(state["parameters"], states[state["step"]]["parameters"]) for state in (*saved, last)]
    return same(expected, found), all(alike), len({state["step"] for state in saved})


@pytest.mark.parametrize(("spec", "ours"), list(zip(SPECS, (True, False, True, False), strict=True)))
def test_a_thread_that_saves_changes_no_bit_of_training_and_gets_whole_steps(ranks, spec, ours):
    for trained_alike, saved_alike, different in ranks.run(saved_meanwhile, 2, spec, ours):
        assert trained_alike
        assert saved_alike
        assert different > 3


def within_backward(model, act):
    """Run `act` on another thread in the middle of a backward, after some of its buckets have left."""

    def hook(_):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return model.module.p0.register_hook(hook)


def changed_within(rank, world_size, spec, ours):
    """Averages of the step in whose middle a thread changed the handle and of those after; and as they should be."""
    answers = []
    for change in ("load", "swap"):
        models = [wrapped(spec, ours) for _ in range(2)]
        states = []
        for model, handle in models:
            for step in range(2):
                step_of(model, rank, step)
            states.append(handle.state_dict())
            step_of(model, rank, 2)

        def act(handle, state, change=change):
            handle.load_state_dict(state) if change == "load" else handle.swap("none")

        (model, handle), (other, other_s) = models
        hook = within_backward(model, functools.partial(act, handle, states[0]))
        found = [step_of(model, rank, 3)]
        hook.remove()
        expected = [step_of(other, rank, 3)]
        act(other_s, states[1])
        found += [step_of(model, rank, step) for step in (4, 5)]
        expected += [step_of(other, rank, step) for step in (4, 5)]
        answers.append((same(found, expected), same(handle.state_dict(), other_s.state_dict())))
        handle.close()
        other_s.close()
    return answers


@pytest.mark.parametrize(("spec", "ours"), [("topk:ratio=0.05", True), ("powersgd:rank=2", False)])
def test_what_a_thread_loads_or_swaps_within_a_step_takes_effect_after_it(ranks, spec, ours):
    assert ranks.run(changed_within, 2, spec, ours) == [[(True, True)] * 2] * 2


def rescaled(rank, world_size, spec):
    """Whether what was taken before a rescaling is as it was."""
    model, handle = wrapped(spec, ours=True)
    step_of(model, rank, 0)
    expected, taken = handle.state_dict(), handle.averager.snapshot()
    handle.rescale(2.0)
    step_of(model, rank, 1)
    alike = same(taken.state_dict()["parameters"], expected["parameters"])
    handle.close()
    return alike


@pytest.mark.parametrize("spec", SPECS)
def test_a_rescaling_does_not_reach_what_was_taken_before(ranks, spec):
    assert ranks.run(rescaled, 2, spec) == [True, True]


HANDLES = {  # where a step's buckets, or their numbers, tell differently when it is over
    "own": {"ours": True},
    "own, unused": {"ours": True, "find_unused_parameters": True},
    "attached": {"ours": False},
    "attached, static graph": {"ours": False, "static_graph": True},
    "attached, unused": {"ours": False, "find_unused_parameters": True},
}


def between_buckets(model, handle, saves):
    """Save within backward, too, when all averages are there of the buckets that have left."""

    def hook(_):
        while not handle.averager.engines.idle:
            time.sleep(0.001)
        saves.once()

    for parameter in model.parameters():
        parameter.register_hook(hook)


def saved_at_requests(rank, world_size, spec, kind, undo):
    """Averages without saves and with one before and after each request; whether what was saved is of whole steps.

    Requests wait for the saves with `undo`, where no save waits for a step.
    """
    options = {**OPTIONS, **HANDLES[kind]}
    ours, found, states = options.pop("ours"), [], {}
    for quiet in (True, False):
        saves = Saves(waits=bool(undo))
        if ours:
            model = gradwire.DistributedDataParallel(
                Given(SHAPES), compressor=spec, transport=saves, undo=undo, **options
            )
            handle = model.compression
        else:
            model = TorchDDP(Given(SHAPES), **options)
            handle = gradwire.attach(model, spec, transport=saves, undo=undo)
        saves.save, averages = None if quiet else handle.state_dict, []
        if not quiet and not ours:
            between_buckets(model, handle, saves)
        for step in range(5):
            averages.append(step_of(model, rank, step))
            saves.join()
            if quiet:
                states[step + 1] = handle.state_dict()
        found.append(averages)
        handle.close()
    assert not saves.errors, saves.errors
    whole = [state for state in saves.results if state["step"] > 2]  # new buckets are met in steps 1 to 3
    alike = [same(state["parameters"], states[state["step"]]["parameters"]) for state in whole]
    return same(*found), all(alike), len({state["step"] for state in whole})


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize(
    ("spec", "kind"),
    list(zip(("topk:ratio=0.05", "onebit", "powersgd:rank=2", "topk:ratio=0.05", "onebit"), HANDLES, strict=True)),
)
def test_a_thread_that_saves_beside_each_request_gets_whole_steps(ranks, spec, kind, undo):
    for trained_alike, saved_alike, different in ranks.run(saved_at_requests, 2, spec, kind, undo):
        assert trained_alike
        assert saved_alike
        assert different > 1


def saved_after_a_break(rank, world_size, elsewhere):
    """The step of a save after a backward that broke off, and the parameters whose residuals it lacks; by which thread."""
    model, handle = wrapped("topk:ratio=0.05", ours=True)
    for step in range(3):
        step_of(model, rank, step)

    def fail(_):
        while not handle.averager.engines.idle:
            time.sleep(0.001)
        raise ValueError("broken off")

    hook = model.module.p0.register_hook(fail)  # the last gradient
    with pytest.raises(ValueError, match="broken off"):
        step_of(model, rank, 3)
    hook.remove()
    saves = Saves()
    saves.save = handle.state_dict
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "QUIET", 0.5)
        saves.once() if elsewhere else saves._saved(handle.state_dict)
    (state,) = saves.results
    zero = [name for name, fields in state["parameters"].items() if not fields["residual"].any()]
    handle.close()
    return state["step"], zero


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_save_after_a_backward_that_broke_off_lacks_residuals_that_the_step_has_overwritten(ranks, elsewhere):
    for step, zero in ranks.run(saved_after_a_break, 2, elsewhere):
        assert step == 3
        assert 0 < len(zero) < len(SHAPES)
