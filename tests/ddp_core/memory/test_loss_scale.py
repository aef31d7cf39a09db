"""What is held back follows the scale of a scaler; of a loaded state it is known with the next step."""

from types import SimpleNamespace

import pytest

from gradwire.ddp_core.memory.loss_scale import LossScale


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


def test_what_has_no_scale_is_refused():
    with pytest.raises(TypeError, match=r"has get_scale\(\) as that has; got 8.0"):
        LossScale(8.0, print)
