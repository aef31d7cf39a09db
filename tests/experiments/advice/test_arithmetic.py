"""A method's arithmetic: as many phases as predictions have requests, for each method that there is."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks, compressor
from gradwire.compress.protocol.requests import all_reduce
from gradwire.compress.state.tree import PerParameter
from gradwire.ddp_core.measure.clock import clock_of
from gradwire.experiments.advice.arithmetic import REPEATS, gradient_pool, measured_arithmetic
from gradwire.experiments.advice.network import GROWTH, SMALLEST, _sizes
from gradwire.experiments.advice.predict import requests_on

CPU = torch.device("cpu")
LAYOUT = Layout(("w", "b"), ((64, 64), (64,)), torch.float32, CPU, Ranks(4))
POOL = gradient_pool(CPU, torch.float32, 2**14)
SPECS = [*gradwire.compressors()]


@pytest.mark.parametrize("spec", SPECS)
def test_each_method_can_be_timed(spec):
    found = measured_arithmetic(compressor(spec), [LAYOUT], POOL, clock_of(CPU))
    assert all(seconds >= 0 for seconds in found.phases)
    assert len(found.phases) == 1 + len(requests_on(spec, replace(LAYOUT, device=torch.device("meta"))))


class Counting:
    """Adds 1 to what it remembers, step after step."""

    def __init__(self):
        self.read = []

    def init(self, layout):
        return PerParameter.zeros(layout)

    def reduce(self, grad, state, residual=None):
        before, after = state.update()
        self.read.append(before[0].item())
        torch.add(before, 1, out=after)
        return (yield from all_reduce(grad))


def test_a_timed_step_goes_on_from_the_one_before():
    counting = Counting()
    measured_arithmetic(counting, [LAYOUT], POOL, clock_of(CPU))
    assert counting.read == list(range(1 + REPEATS))


@pytest.mark.parametrize("payload", [1, 1000, SMALLEST, SMALLEST + 512, SMALLEST * GROWTH, 25 * 2**20])
def test_payloads_that_are_timed_lie_well_apart(payload):
    sizes = _sizes(payload)
    assert len(sizes) >= 2
    assert sizes[-1] >= payload
    assert all(after >= (GROWTH - 1) * before for before, after in pairwise(sizes))
    assert sizes[0] >= SMALLEST
