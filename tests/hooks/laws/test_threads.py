"""Another thread saves, loads, swaps and rescales while training goes on, under every wrapper."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire
from gradwire.compress.protocol.requests import AllToAll
from gradwire.ddp_core.averaging import steps

from ..given import same
from ..saving import ALL, Saves
from .test_loss_scale import Scaler
from .wrappers import EVERY, VARIANTS, WHOLE, WRAPPERS, Training, alike, counted, few, held, over

STEPS = 6
MET = 4  # steps, in the first of which new buckets are met: there the fields of a state move


def training_of(wrapper, undo, spec=None, **options):
    saves = Saves(waits=undo)  # without a copy a save waits for the step, which does not wait for it
    return Training(wrapper, spec, transport=saves, undo=undo, **options), saves


def between_buckets(training, saves):
    """Save within backward, too, when all averages are there of the buckets that have left: torch's hook hears of no end."""

    def hook(_):
        while not training.handle.averager.engines.idle:
            time.sleep(0.001)
        saves.once()

    for _, parameter in training.parameters():
        parameter.register_hook(hook)


def saved_within(rank, world_size, wrapper, undo):
    """Averages without saves and with one before and after each request; whether saves are of whole steps; which."""
    found = {}
    for spec in few(wrapper):
        quiet, _ = training_of(wrapper, undo, spec)
        states, expected = {0: quiet.handle.state_dict()}, []
        for number in range(STEPS):
            expected.append(quiet.step(number))
            states[number + 1] = quiet.handle.state_dict()
        quiet.close()
        training, saves = training_of(wrapper, undo, spec)
        saves.save, averages = training.handle.state_dict, []
        if wrapper.startswith("attach"):
            between_buckets(training, saves)
        for number in range(STEPS):
            averages.append(training.step(number))
            saves.once()
            saves.join()
        training.close()
        assert not saves.errors, saves.errors
        whole = [state for state in saves.results if counted(state) >= MET]
        assert all(alike(state, states[counted(state)]) for state in whole)
        found[spec] = same(averages, expected), {counted(state) for state in whole}
    return found


@over(*WRAPPERS, *VARIANTS)
def test_a_thread_that_saves_anywhere_in_a_step_changes_no_bit_and_gets_whole_steps(ranks, wrapper):
    assert_whole(ranks, wrapper, undo=False)


@over("attach", "own", "FSDP2", "HSDP")
def test_so_does_one_where_each_request_waits_for_a_save_from_a_copy(ranks, wrapper):
    assert_whole(ranks, wrapper, undo=True)


def assert_whole(ranks, wrapper, undo):
    for found in ranks.run(saved_within, EVERY[wrapper].world_size, wrapper, undo):
        for unchanged, numbers in found.values():
            assert unchanged
            assert numbers == set(range(MET, STEPS + 1))


CHANGES = {
    "load": lambda training, state: training.handle.load_state_dict(state),
    "rescale": lambda training, state: training.handle.rescale(2.0),
    "swap": lambda training, state: training.swap("none"),
}


def changed_within(rank, world_size, wrapper):
    """{change: whether averages and states are those of a change after the step}, which a thread makes in its middle."""
    found = {}
    for name, change in CHANGES.items():
        ends = []
        for within in (True, False):
            training, saves = training_of(wrapper, undo=True)
            training.steps(0, 2)
            state = training.handle.state_dict()
            training.step(2)

            def once(training=training, saves=saves, state=state, change=change):
                saves.save = None
                change(training, state)

            saves.save = once if within else None
            saves.kinds = AllToAll if wrapper in ("FSDP2", "HSDP") else ALL  # that of the first gradients
            averages = [training.step(3)]
            assert saves.save is None, "no request was seen"
            assert not saves.errors, saves.errors
            if not within:
                change(training, state)
            averages += training.steps(4, 6)
            ends.append((averages, held(training.handle.state_dict())))
            training.close()
        found[name] = same(*ends)
    return found


@over("attach", "own", "FSDP2", "HSDP")
def test_what_a_thread_changes_within_a_step_takes_effect_after_it(ranks, wrapper):
    for found in ranks.run(changed_within, WRAPPERS[wrapper].world_size, wrapper):
        assert found == dict.fromkeys(CHANGES, True)


def scale_changed_within(rank, world_size, wrapper, undo, act):
    """Averages and states where the scale doubles, and a thread saves or loads, after a step and within it."""
    ends = []
    for within in (False, True):
        scaler, kept = Scaler(2.0), {}
        training, saves = training_of(wrapper, undo, scaler=scaler)
        training.steps(0, 2)
        kept["loaded"] = training.handle.state_dict()

        def once(training=training, scaler=scaler, saves=saves, kept=kept):
            saves.save = None
            if act == "save":
                scaler.scale = 4.0
                kept["saved"] = held(training.handle.state_dict())
            else:
                training.handle.load_state_dict(kept["loaded"])

        saves.save, saves.kinds = once if within else None, AllToAll if wrapper in ("FSDP2", "HSDP") else ALL
        averages = [training.step(2)]
        saves.join()
        assert not saves.errors, saves.errors
        if not within:
            once()
        scaler.scale = 4.0
        averages += training.steps(3, 5)
        ends.append((averages, held(training.handle.state_dict()), kept.get("saved")))
        training.close()
    (quiet, before, saved), (found, after, saved_within) = ends
    return same(found, quiet), same(after, before), saved is None or undo or same(saved_within, saved)


@pytest.mark.parametrize(("act", "undo"), [("save", True), ("save", False), ("load", True)])
@over("attach", "own", "FSDP2")
def test_residuals_follow_a_loss_scale_that_changes_within_a_step_once_it_has_ended(ranks, wrapper, act, undo):
    count = WRAPPERS[wrapper].world_size
    assert ranks.run(scale_changed_within, count, wrapper, undo, act) == [(True, True, True)] * count


def rescaled(rank, world_size, spec):
    """Whether what was taken before a rescaling, and not made a state yet, is as it was."""
    training = Training("own", spec)
    training.step(0)
    expected, taken = training.handle.state_dict(), training.handle.averager.snapshot()
    training.handle.rescale(2.0)
    training.step(1)
    training.close()
    return same(taken.state_dict()["parameters"], expected["parameters"])


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "onebit", "powersgd:rank=2", "batched-powersgd"])
def test_a_rescaling_does_not_reach_what_was_taken_before(ranks, spec):
    assert ranks.run(rescaled, 2, spec) == [True, True]


def followed_by_a_save(rank, world_size):
    """How often a save had the stream that reads residuals wait for that of steps, as a GPU needs it."""
    training, follows = Training("replicas"), []
    training.step(0)
    training.handle.replicas.averager.engines.follow = lambda: follows.append(1)
    training.handle.state_dict()
    training.close()
    return len(follows)


@over("replicas")
def test_a_save_follows_the_stream_of_steps_where_gradwire_serves_replicas_alone(ranks, wrapper):
    assert ranks.run(followed_by_a_save, 2) == [1, 1]


def saved_asynchronously(rank, world_size, wrapper, folder):
    """Whether training beside torch's `async_save` is as without, and goes on from each checkpoint as it went on then."""
    training = Training(wrapper)
    expected = training.steps(0, STEPS)
    training.close()
    training = Training(wrapper)
    beside, found, saving = dist.new_group(backend="gloo"), [], []
    for number in range(STEPS):
        found.append(training.step(number))
        for each in saving:  # one at a time, as torch wants it
            each.result(60)
        folder_of = {"checkpoint_id": f"{folder}/{number}", "process_group": beside}
        saving.append(dcp.async_save({"compression": stateful(training)}, **folder_of))
    saving[-1].result(60)
    training.close()
    went_on = []
    for number in range(1, STEPS - 1):
        training = Training(wrapper)
        dcp.load({"compression": stateful(training)}, checkpoint_id=f"{folder}/{number}", process_group=beside)
        went_on.append(same(training.steps(number + 1, STEPS), expected[number + 1 :]))
        training.close()
    return same(found, expected), went_on


def stateful(training):
    """What torch's checkpoints take of a handle."""
    return gradwire.GatheredState(training.handle) if training.wrapper in WHOLE else training.handle


@over("attach", "FSDP2", "replicas")
def test_async_save_of_torch_holds_whole_steps_that_training_goes_on_from(ranks, wrapper, tmp_path):
    for unchanged, went_on in ranks.run(saved_asynchronously, 2, wrapper, str(tmp_path)):
        assert unchanged
        assert all(went_on)


@contextmanager
def broken(training):
    """A backward breaks off behind its first averages, which come before it does."""
    parts = [module for name, module in training.model.named_modules() if name.endswith("parts.0")]

    def fail(_):
        raise ArithmeticError("broken off")

    hook = parts[0].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with pytest.raises(ArithmeticError, match="broken off"):
        yield
    hook.remove()


def saved_after_a_break(rank, world_size, wrapper, undo, elsewhere):
    """The step of a save after a backward that broke off, and whether each residual is as before, or zero."""
    training = Training(wrapper, undo=undo)
    training.steps(0, 3)
    before, states = training.handle.state_dict(), []
    with broken(training):
        training.step(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "QUIET", 0.5)
        thread = threading.Thread(target=lambda: states.append(training.handle.state_dict()), daemon=True)
        thread.start() if elsewhere else thread.run()
        thread.join(20) if elsewhere else None
    kept, fields = held(before), held(states[0])
    as_before = [torch.equal(each, kept[key][name]) for key, its in fields.items() for name, each in its.items()]
    zero = [not each.any() for its in fields.values() for each in its.values()]
    training.close()
    return counted(states[0]), [a or (z and not undo) for a, z in zip(as_before, zero, strict=True)]


@over()
def test_a_save_after_a_backward_that_broke_off_is_of_the_step_before(ranks, wrapper):
    assert_of_the_step_before(ranks, wrapper, undo=False, elsewhere=True)


@pytest.mark.parametrize(("undo", "elsewhere"), [(False, False), (True, True)])
@over("attach", "own", "FSDP2")
def test_so_is_one_that_broke_off_with_a_copy_or_on_training_s_own_thread(ranks, wrapper, undo, elsewhere):
    assert_of_the_step_before(ranks, wrapper, undo, elsewhere)


def assert_of_the_step_before(ranks, wrapper, undo, elsewhere):
    answers = ranks.run(saved_after_a_break, WRAPPERS[wrapper].world_size, wrapper, undo, elsewhere)
    for step, right in answers:
        assert step == 3
        assert all(right)
