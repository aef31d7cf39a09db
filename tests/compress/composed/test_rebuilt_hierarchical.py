"""Under `hosts+`, a state that moves into other buckets loses nothing: what is held back stays, or is owed."""

import pytest
import torch

from gradwire.compress import ErrorFeedback, Float32Arithmetic, Hierarchical, Partition, Simulation, TwoShot, compressor
from gradwire.compress.state import tree as states
from gradwire.testing import held_back

from ..given import gradients, layout
from ..test_laws import KINDS, NARROW_RESIDUAL, OWN_LAW, forgets

SHAPES = ((24, 32), (7,), (13, 3, 3), (40, 16), (5, 1), (9, 11))
ORDERS = (((0, 1, 2, 3, 4, 5),), ((0,), (1, 2), (3,), (4, 5)), ((5, 3), (4, 2, 1, 0)))  # the buckets' parameters
INNER = [*(spec for spec in KINDS if spec != "hosts" and not forgets(spec)), *OWN_LAW]
SERVED = {  # what servers hold back is of a group of parameters alone
    "served by group": Partition((("p3", TwoShot(compressor("int4").inner.inner.codec)),), compressor("none"))
}


def buckets_of(order, ranks_per_host):
    whole = layout(*SHAPES, world_size=2 * ranks_per_host, per_host=ranks_per_host)
    return [whole.select(places) for places in order]


def held_by_name(simulations, owed):
    """{name: mean over ranks of what is held back and owed}."""
    total = {}
    for within, simulation in simulations:
        for name, view in within.views(held_back(simulation, within)).items():
            total[name] = view.reshape(-1)
    for name, numbers in owed:
        total[name] = total[name] + numbers
    return total


def moved(built, old, order, ranks_per_host):
    """The buckets of another order with the states of the old ones, and what their ranks owe."""
    new = [(within, Simulation(built, within)) for within in buckets_of(order, ranks_per_host)]
    owed = []
    for rank in range(2 * ranks_per_host):
        saved = {}
        for _, simulation in old:
            saved |= states.save(simulation.states[rank])
        for within, simulation in new:
            entries = {name: saved[name] for name in within.names if name in saved}
            missing = states.load(simulation.states[rank], entries)
            owed += [(name, numbers.double() / (2 * ranks_per_host)) for name, numbers in missing.items()]
    return new, owed


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*INNER, *SERVED])
def test_a_state_in_rebuilt_buckets_conserves_what_is_held_back(spec):
    ranks_per_host, before, after = [(2, 0, 1), (3, 1, 2), (2, 2, 0)][[*INNER, *SERVED].index(spec) % 3]
    built = (
        Hierarchical(ErrorFeedback(Float32Arithmetic(SERVED[spec]))) if spec in SERVED else compressor(f"hosts+{spec}")
    )
    old = [(within, Simulation(built, within)) for within in buckets_of(ORDERS[before], ranks_per_host)]
    for within, simulation in old:
        simulation.step(gradients(within))
    expected = held_by_name(old, ())
    found = held_by_name(*moved(built, old, ORDERS[after], ranks_per_host))
    rounded = [loss for option, loss in NARROW_RESIDUAL.items() if option in spec]  # anew, in blocks of other elements
    largest = max(numbers.abs().max() for numbers in expected.values())
    atol = max([1e-6, *(loss * largest for loss in rounded)])
    for name, numbers in expected.items():
        torch.testing.assert_close(found[name], numbers, rtol=1e-6, atol=atol, msg=name)
