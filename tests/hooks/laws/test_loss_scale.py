"""A loss scale that changes, under every wrapper: residuals follow it, and its powers of two change no bit."""

import threading
import time
from functools import partial

import pytest
import torch

from ..given import same
from .wrappers import WHOLE, WRAPPERS, Training, few, over

SCALES = [1024.0, 1024.0, 2048.0, 4096.0, 512.0, 512.0]
BACK = 3  # the step before which the scale of the steps so far is taken back


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


def scaled(training, number, scale):
    """The averages of a step under a loss scale, in units of gradients."""
    return {name: average / scale for name, average in training.step(number, scale).items()}


def by_hand(wrapper, spec, scales):
    """The user tells the handle."""
    training, averages = Training(wrapper, spec), []
    for number, scale in enumerate(scales):
        if number and scale != scales[number - 1]:
            training.handle.rescale(scale / scales[number - 1])
        averages.append(scaled(training, number, scale))
    training.close()
    return averages


def by_scaler(before, wrapper, spec, scales):
    """The handle follows a scaler; `before` comes before the step that BACK names, and returns who trains on."""
    scaler = Scaler(scales[0])
    training, averages = Training(wrapper, spec, scaler=scaler), []
    for number, scaler.scale in enumerate(scales):
        if number == BACK:
            training = before(training, scaler)
        averages.append(scaled(training, number, scaler.scale))
    with pytest.raises(RuntimeError, match=r"leave rescale\(\) out"):
        training.handle.rescale(2.0)
    training.close()
    return averages


def followed(training, scaler):
    """A handle may follow a scaler again."""
    training.handle.follow(scaler)
    return training


def resumed(training, scaler):
    """The scale changes right before a save; all else is made anew then."""
    state = training.handle.state_dict()
    training.close()
    new = Training(training.wrapper, training.spec, scaler=scaler)
    new.handle.load_state_dict(state)
    return new


def rolled_back(training, scaler):
    """A state of another scale than the handle's last one, loaded in three ways: its own, and gathered."""
    whole, scale = training.wrapper in WHOLE, scaler.scale
    kept, gathered = training.handle.state_dict(), training.handle.gather_state_dict() if whole else None
    for load in (False, True) if whole else (False,):
        scaler.scale *= 8
        for later in (7, 8):
            scaled(training, later, scaler.scale)
        training.handle.scatter_state_dict(gathered) if load else training.handle.load_state_dict(kept)
        scaler.scale = scale
    return training


WAYS = {"by hand": by_hand} | {each.__name__: partial(by_scaler, each) for each in (followed, resumed, rolled_back)}


def all_ways(rank, world_size, wrapper):
    """{(specification, way): whether averages are those of no loss scale}."""
    found = {}
    for spec in few(wrapper):
        expected = by_hand(wrapper, spec, [1.0] * len(SCALES))
        for name, way in WAYS.items():
            found[spec, name] = same(way(wrapper, spec, SCALES), expected)
    return found


@over(leave_out=["HSDP by torch"])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(ranks, wrapper):
    for found in ranks.run(all_ways, WRAPPERS[wrapper].world_size, wrapper, timeout=120):
        assert all(found.values()), found


def reads_of_steps(rank, world_size, wrapper):
    """For each step, the times that the scale was read in forward and in backward."""
    scaler, reads, found = torch.amp.GradScaler("cpu", init_scale=1.0), [], []
    scaler.get_scale = lambda read=scaler.get_scale: reads.append(1) or read()
    scaler.scale(torch.ones(1))  # makes its tensor
    training = Training(wrapper, scaler=scaler)
    training.model.register_forward_hook(lambda *_: found.append(len(reads)))
    for number in range(3):
        reads.clear()
        training.step(number)
        found.append(len(reads))
        scaler.update(1.0)
    training.close()
    return found


@over()
def test_the_scale_is_read_before_forward_and_never_in_backward_where_a_gpu_would_be_behind(ranks, wrapper):
    count = WRAPPERS[wrapper].world_size
    assert ranks.run(reads_of_steps, count, wrapper) == [[1] * 6] * count


def loaded_beside_training(rank, world_size, wrapper):
    """Whether steps after a load by another thread are right, where training goes on before the call has ended."""
    scaler, loaded = Scaler(1024.0), threading.Event()
    training = Training(wrapper, scaler=scaler)
    for number in range(3):
        scaled(training, number, scaler.scale)
    state = training.handle.state_dict()
    expected = [scaled(training, number, scaler.scale) for number in (3, 4)]
    scaler.scale = 4096.0
    scaled(training, 5, scaler.scale)
    forget = training.handle._loss_scale.forget

    def forget_late():
        loaded.set()
        time.sleep(0.5)
        forget()

    training.handle._loss_scale.forget = forget_late
    thread = threading.Thread(target=training.handle.load_state_dict, args=(state,))
    thread.start()
    assert loaded.wait(60)
    scaler.scale = 1024.0
    found = [scaled(training, number, scaler.scale) for number in (3, 4)]
    thread.join()
    training.close()
    return same(expected, found)


@over("attach", "own", "FSDP2")
def test_a_step_beside_a_load_on_another_thread_takes_the_loss_scale_of_the_state_or_of_training(ranks, wrapper):
    assert ranks.run(loaded_beside_training, 2, wrapper) == [True, True]
