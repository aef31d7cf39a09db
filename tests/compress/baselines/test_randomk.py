"""Random blocks: the same on all ranks, from numbers that depend on seed, step and name alone."""

import hashlib

import numpy
import pytest
import torch

from gradwire.compress import compressor

from ..given import assert_goes_on_after_a_load, assert_steps_of, layout

BLOCK = 16
SPEC = f"randomk:ratio=0.1,block={BLOCK}"
SHAPES = ((24, 31), (5,))  # 749 elements: 46 blocks and 13 elements behind them


def drawn(step, blocks=46):
    """The blocks of a step, from the description of the method."""
    digest = hashlib.sha256(f"0/{step}/p0".encode()).digest()  # seed, step and name
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(blocks, generator=generator).numpy()[: int(numpy.ceil(0.1 * blocks))]


def places(chosen, numel):
    """Which elements are sent: those of the chosen blocks, and those behind the last whole block."""
    sent = numpy.arange(numel) >= numel // BLOCK * BLOCK
    for index in chosen:
        sent[index * BLOCK : (index + 1) * BLOCK] = True
    return sent


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_is_rand_k_with_memory(world_size, feedback):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)

    def sent_of(values, _, step):
        return numpy.where(places(drawn(step), within.numel), values, 0)

    assert_steps_of(SPEC, within, sent_of, feedback)


def test_a_loaded_state_goes_on_with_the_same_blocks():
    assert_goes_on_after_a_load(compressor(SPEC), layout(*SHAPES))
