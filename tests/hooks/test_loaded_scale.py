"""A handle that has trained under one loss scale loads a state of another one, as after a spike: both go back together."""

import threading
import time
from functools import partial

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients
from .test_handle import same
from .test_threads import within_backward

SHAPES = ((40, 30), (40,), (30, 20))  # two buckets
SPECS = ["topk:ratio=0.1", "onebit", "powersgd:rank=1,min_compression_rate=1"]
SAVED, LATER = 1024.0, 4096.0


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


def handled(spec, ours, scaler):
    options = {"bucket_cap_mb": 0.002}
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, scaler=scaler, **options)
        return model, model.compression
    model = TorchDDP(Given(SHAPES), **options)
    return model, gradwire.attach(model, spec, scaler=scaler)


def scaled(model, rank, step, scaler):
    given = [scaler.scale * gradient for gradient in gradients(rank, step, SHAPES)]
    return average(model, given)


def rolled_back(rank, world_size, ours):
    """By compressor whether steps after a rollback have the bits that they had the first time."""
    results = {}
    for spec in SPECS:
        scaler = Scaler(SAVED)
        model, handle = handled(spec, ours, scaler)
        for step in range(3):
            scaled(model, rank, step, scaler)
        state = handle.state_dict()
        expected = [scaled(model, rank, step, scaler) for step in (3, 4)]
        scaler.scale = LATER
        for step in (5, 6):
            scaled(model, rank, step, scaler)
        handle.load_state_dict(state)
        scaler.scale = SAVED
        results[spec] = same(expected, [scaled(model, rank, step, scaler) for step in (3, 4)])
        handle.close()
    return results


@pytest.mark.parametrize("ours", [True, False])
def test_after_a_rollback_to_another_loss_scale_steps_have_the_same_bits_again(ranks, ours):
    assert ranks.run(rolled_back, 2, ours) == [dict.fromkeys(SPECS, True)] * 2


def loaded_beside_training(rank, world_size, ours):
    """The same where another thread loads, and training's next step begins before the call has ended."""
    scaler, loaded = Scaler(SAVED), threading.Event()
    model, handle = handled(SPECS[0], ours, scaler)
    for step in range(3):
        scaled(model, rank, step, scaler)
    state = handle.state_dict()
    expected = [scaled(model, rank, step, scaler) for step in (3, 4)]
    scaler.scale = LATER
    scaled(model, rank, 5, scaler)
    forget = handle._loss_scale.forget

    def forget_late():
        loaded.set()
        time.sleep(0.5)
        forget()

    handle._loss_scale.forget = forget_late
    thread = threading.Thread(target=handle.load_state_dict, args=(state,))
    thread.start()
    assert loaded.wait(60)
    scaler.scale = SAVED
    found = [scaled(model, rank, step, scaler) for step in (3, 4)]
    thread.join()
    handle.close()
    return same(expected, found)


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_beside_a_load_on_another_thread_takes_the_loss_scale_of_the_state_or_of_training(ranks, ours):
    assert ranks.run(loaded_beside_training, 2, ours) == [True, True]


def loaded_within_a_step(rank, world_size, ours):
    """Steps after a load between two steps, and after one on another thread within a step; then the scale doubles."""
    runs = []
    for within in (False, True):
        scaler = Scaler(SAVED)
        model, handle = handled(SPECS[0], ours, scaler)
        for step in range(3):
            scaled(model, rank, step, scaler)
        state = handle.state_dict()
        scaled(model, rank, 3, scaler)
        hook = within_backward(model, partial(handle.load_state_dict, state)) if within else None
        scaled(model, rank, 4, scaler)
        hook.remove() if hook else handle.load_state_dict(state)
        runs.append([])
        for scaler.scale in (SAVED, 2 * SAVED, 2 * SAVED):
            runs[-1].append(scaled(model, rank, 5, scaler))
        handle.close()
    return same(*runs)


@pytest.mark.parametrize("ours", [True, False])
def test_residuals_that_a_thread_loads_within_a_step_follow_the_next_change_of_the_loss_scale(ranks, ours):
    assert ranks.run(loaded_within_a_step, 2, ours) == [True, True]
