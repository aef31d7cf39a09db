"""Predictions from parts made by hand: what grows with the number of hosts."""

import pytest
import torch

from gradwire.compress import Layout
from gradwire.ddp_core.planning.link_cost import LinkCost
from gradwire.ddp_core.planning.shared_cores import Work
from gradwire.hooks.advice.arithmetic import Arithmetic
from gradwire.hooks.advice.network import KindCost
from gradwire.hooks.advice.predict import Measured, World, predicted, requests_on
from gradwire.hooks.advice.training import Computation

SIDE = 512
FOUR = World(4, 1)


def decoding(spec, world):
    """Seconds of a step on `world` in which only decoding takes time: 1 on four ranks."""
    layout = Layout(("w",), ((SIDE, SIDE),), torch.float32, torch.device("meta"), world_size=4)
    requests, idle = requests_on(spec, layout), Work(0.0, 1.0)
    phases = (0.0,) * len(requests) + (1 / SIDE**2,)
    measured = Measured(
        Computation(idle, idle, idle, {"w": 0.0}, {"w": 0.0}),
        {"w": torch.empty(SIDE, SIDE, device="meta")},
        {spec: Arithmetic(phases, 1.0)},
        {each.kind: KindCost(LinkCost(0.0, 0.0), 0.0) for each in requests},
        copy=0.0,
        world=FOUR,
        cores=1.0,
        rings=True,
        by_need=True,
    )
    return predicted(measured, spec, "backward", world).step


@pytest.mark.parametrize(("spec", "grown"), [("int8", 1.0), ("int4", 1.0), ("topk:ratio=0.01", 64.0), ("bf16", 1.0)])
def test_decoding_grows_as_the_bytes_that_are_gathered(spec, grown):
    assert decoding(spec, FOUR) == pytest.approx(1.0)
    assert decoding(spec, World(256, 1)) == pytest.approx(grown, rel=0.02)
