"""What real ranks compute, against the simulator."""

from functools import cache

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks, Simulation, compressors
from gradwire.compress.state import tree as states

from .given import average, gradients, wrapped

SHAPES = ((16, 20), (9,), (12, 30), (4, 4), (16, 20))
STEPS = 3


def run_for_simulator(rank, world_size, specs):
    runs = {}
    for spec in specs:
        ddp = wrapped(SHAPES, bucket_cap_mb=0.001)
        handle = gradwire.attach(ddp, spec)
        averages = [average(ddp, gradients(rank, step, SHAPES)) for step in range(STEPS)]
        buckets = [bucket.parameters for bucket in handle.stats().buckets]
        runs[spec] = averages, buckets, handle.state_dict()["parameters"]
        handle.close()
    return runs


@cache
def simulated(spec, names, world_size):
    """The averages {name: flat} of each step of a bucket, and the ranks' states at the end."""
    shapes = {f"p{index}": shape for index, shape in enumerate(SHAPES)}
    layout = Layout(names, tuple(shapes[n] for n in names), torch.float32, torch.device("cpu"), Ranks(world_size))
    simulation = Simulation(gradwire.compressor(spec), layout)
    averages = []
    for step in range(STEPS):
        given = [dict(zip(shapes, gradients(rank, step, SHAPES), strict=True)) for rank in range(world_size)]
        flat = simulation.step([torch.cat([numbers[n].view(-1) for n in names]) for numbers in given])[0]
        averages.append(layout.views(flat))
    return averages, [states.save(state) for state in simulation.states]


def assert_as_simulated(rank, run, spec, world_size, tolerance):
    averages, buckets, state = run
    assert len(buckets) > 1
    for names in buckets:
        expected, ranks_states = simulated(spec, tuple(names), world_size)
        for step in range(STEPS):
            for name in names:
                torch.testing.assert_close(averages[step][name], expected[step][name], rtol=0, atol=tolerance)
        for name, entries in ranks_states[rank].items():
            for field, numbers in entries.items():
                torch.testing.assert_close(state[name][field], numbers, rtol=0, atol=tolerance)


WRAPPED = [
    "fp16+powersgd:rank=1",
    "powersgd:rank=2,start_iter=2",
    "onebit:block=64",
    "int4:rounding=stochastic",
    "randomk:ratio=0.1,block=16",
    "bf16+chunktopk:ratio=0.1,chunk=16",
]
EVERY = [name for name in compressors() if name != "dgc"]  # which takes no parameters that may be unused
IN_RANK_ORDER = ("topk", "onebit", "int8", "int4", "int2", "ternary")  # sums of gathered payloads


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_ranks_compute_what_the_simulator_says_two_in_every_bit(ranks, world_size):
    specs = [*EVERY, *WRAPPED] if world_size == 2 else ["none", "powersgd", "topk", "onebit", "int4"]
    for rank, runs in enumerate(ranks.run(run_for_simulator, world_size, specs)):
        for spec in specs:
            exact = world_size == 2 or spec.startswith(IN_RANK_ORDER)
            assert_as_simulated(rank, runs[spec], spec, world_size, 0 if exact else 1e-4)


HOSTS = (
    "none",
    "topk:ratio=0.1",
    "powersgd:rank=2",
    "onebit:block=64",
    "randomk:ratio=0.1,block=16,start_iter=2",
)


@pytest.mark.slow
def test_hosts_of_two_ranks_compute_what_the_simulator_says_in_every_bit(ranks):
    specs = [f"hosts:ranks=2+{spec}" for spec in HOSTS]
    for rank, runs in enumerate(ranks.run(run_for_simulator, 4, specs)):
        for spec in specs:
            assert_as_simulated(rank, runs[spec], spec, 4, 0)
