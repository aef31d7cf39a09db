"""What is held back follows a framework's loss scale, resumed or not.

On a CPU, Accelerate and the Trainer make no scaler, whatever the precision, so they are given one, and Lightning a plugin.
"""

import torch
from torch.nn.functional import mse_loss

from ..given import same
from . import test_accelerate, test_lightning, test_transformers
from .launched import STEPS, TIMEOUT, forget_accelerate, launched, needing, numbers

SCALE = 1024.0


def scaler_of(interval):
    """Its scale doubles after so many steps."""
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=interval)


def steps(accelerator, model, optimizer, loader):
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def accelerated(world_size, scaler, folder=None):
    """Two epochs; with a folder anew after the first one."""
    *parts, handle = test_accelerate.prepared(world_size, scaler=scaler)
    assert handle.scaler is scaler
    steps(*parts)
    if folder is not None:
        parts[0].save_state(folder)
        handle.close()
        *parts, handle = test_accelerate.prepared(world_size, scaler=scaler_of(1))
        parts[0].load_state(folder)
    steps(*parts)
    handle.close()
    scaler = parts[0].scaler
    forget_accelerate()
    return numbers(parts[1]), scaler and scaler.get_scale()


def by_accelerate(rank, world_size, folder):
    with launched(rank, world_size):
        unscaled, _ = accelerated(world_size, None)
        return unscaled, accelerated(world_size, scaler_of(1)), accelerated(world_size, scaler_of(1), folder)


@needing("accelerate")
def test_accelerate_s_scaler_is_followed_with_the_bits_of_no_scaling(ranks, tmp_path):
    for unscaled, *scaled in ranks.run(by_accelerate, 2, str(tmp_path), timeout=TIMEOUT):
        for parameters, scale in scaled:
            assert scale == SCALE * 2 ** (2 * STEPS)
            assert same(parameters, unscaled)


def by_transformers(rank, world_size, folder):
    """Without a scaler, and with one."""
    found = []
    with launched(rank, world_size):
        for scaler in (None, scaler_of(1)):
            parameters, handle, _ = test_transformers.trained(world_size, folder, scaler=scaler, max_grad_norm=0)
            assert handle.scaler is scaler
            handle.close()
            found.append(parameters)
    return *found, scaler.get_scale()


@needing("transformers", "accelerate")
def test_the_trainer_s_scaler_is_followed_with_the_bits_of_no_scaling(ranks, tmp_path):
    for unscaled, scaled, scale in ranks.run(by_transformers, 2, str(tmp_path), timeout=TIMEOUT):
        assert scale == SCALE * 2 ** (2 * STEPS)
        assert same(scaled, unscaled)


def by_lightning(rank, world_size, folder):
    """Half precision, with a scale that stays, with one that grows, and with that from the first epoch's checkpoint on."""
    from pytorch_lightning.plugins import MixedPrecision

    found = []
    with launched(rank, world_size):
        for interval, checkpoint in ((10**6, None), (1, None), (1, f"{folder}/1/epoch=0.ckpt")):
            scaler = scaler_of(interval)
            options = {"checkpoint": checkpoint, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}
            parameters, handle, _ = test_lightning.trained(world_size, f"{folder}/{interval}", **options)
            assert handle.scaler is scaler
            found.append((parameters, scaler.get_scale()))
    return found


@needing("pytorch_lightning")
def test_lightning_s_scaler_is_followed_by_half_precision_on_a_cpu(ranks, tmp_path):
    for (steady, scale), *growing in ranks.run(by_lightning, 2, str(tmp_path), timeout=TIMEOUT):
        assert scale == SCALE
        for parameters, scale in growing:
            assert scale == SCALE * 2 ** (2 * STEPS)
            torch.testing.assert_close(parameters, steady)
