"""What is held back follows the scale of a scaler; of a loaded state it is known with the next step."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.ddp_core.memory.rescaled_residuals import LossScale


def test_each_change_of_the_scale_is_followed_once():
    scaler, factors = SimpleNamespace(get_scale=lambda: scaler.scale, scale=8.0), []
    scale = LossScale(scaler, factors.append)
    for scaler.scale in (8.0, 8.0, 2.0, 2.0, 4.0):
        scale.follow()
    assert factors == [1 / 4, 2.0]


def test_a_save_between_the_loads_of_state_and_scaler_does_not_take_the_old_scale_for_that_of_the_state():
    scaler, factors = SimpleNamespace(get_scale=lambda: scaler.scale, scale=8.0), []
    scale = LossScale(scaler, factors.append)
    scale.follow()
    scale.forget()  # a state was loaded
    scale.catch_up()  # and another is saved before the scaler is loaded
    scaler.scale = 2.0
    scale.follow()
    scaler.scale = 4.0
    scale.catch_up()
    assert factors == [2.0]


def test_a_scale_is_read_before_forward_and_again_only_where_it_has_changed_since():
    scaler, factors, reads = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), [], []
    read = scaler.get_scale
    scaler.get_scale = lambda: reads.append(read()) or read()
    scaler.scale(torch.ones(1))  # makes its tensor
    scale, optimizer = LossScale(scaler, factors.append), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for step, stepped in enumerate([True, False, True]):
        for _ in range(3):  # micro-batches
            scale.read_ahead()
        if step == 2:
            scaler.update(4.0)  # between forward and backward
        scale.follow()
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        if stepped:
            scaler.step(optimizer)
            scaler.update()
    assert reads == [8.0, 16.0, 16.0, 4.0]
    assert factors == [2.0, 1 / 4]


def test_what_has_no_scale_is_refused():
    with pytest.raises(TypeError, match=r"has get_scale\(\) as that has; got 8.0"):
        LossScale(8.0, print)
