"""A handle that has trained under one loss scale loads a state of another one, as after a spike: both go back together."""

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients
from .test_handle import same

SHAPES = ((40, 30), (40,))
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
