"""Random blocks: the same on all ranks, from numbers that depend on seed, step and name alone."""

import hashlib

import numpy
import pytest
import torch

from gradwire.compress import Simulation, compressor
from gradwire.compress.baselines.randomk import RandomK
from gradwire.compress.state import tree as states

from ..given import assert_goes_on_after_a_load, assert_steps_of, layout

BLOCK = 16
SPEC = f"randomk:ratio=0.1,block={BLOCK}"
SHAPES = ((24, 31), (5,))  # 749 elements: 46 blocks and 13 elements behind them


def drawn(blocks, ratio, seed=0, step=0, name="p0"):
    """The blocks of a step, from the description of the method."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(blocks, generator=generator).numpy()[: int(numpy.ceil(ratio * blocks))]


def places(chosen, numel, block=BLOCK):
    """Which elements are sent: those of the chosen blocks, and those behind the last whole block."""
    sent = numpy.arange(numel) >= numel // block * block
    for index in chosen:
        sent[index * block : (index + 1) * block] = True
    return sent


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_is_rand_k_with_memory(world_size, feedback):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)

    def sent_of(values, _, step):
        return numpy.where(places(drawn(46, 0.1, step=step), within.numel), values, 0)

    assert_steps_of(SPEC, within, sent_of, feedback)


def chosen(within, step=0, **options):
    """Which elements come out of a gradient of ones."""
    simulation = Simulation(RandomK(ratio=0.1, block=BLOCK, **options), within)
    for state in simulation.states:
        states.set_step(state, step)
    return simulation.step([torch.ones(within.numel)] * within.ranks.world_size)[0]


def test_a_loaded_state_goes_on_with_the_same_blocks():
    assert_goes_on_after_a_load(compressor(SPEC), layout(*SHAPES))
