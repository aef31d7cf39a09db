"""Predictions from parts made by hand: what grows with the number of hosts."""

import pytest
import torch

from gradwire.compress import AllGather, AllReduce, AllToAll, Layout, Ranks
from gradwire.ddp_core.measure.step_model import LinkCost
from gradwire.experiments.advice.arithmetic import Arithmetic
from gradwire.experiments.advice.network import KindCost
from gradwire.experiments.advice.predict import Measured, predicted, requests_on
from gradwire.experiments.advice.shared_cores import Work
from gradwire.experiments.advice.timed_training import Computation

SIDE = 512
FOUR = Ranks(4)
SPECS = ("none", "bf16", "int8", "topk:ratio=0.01")


def step_on(ranks, spec, decode, latency):
    """Seconds of a step in which only decoding takes time, so many seconds on four ranks, and `latency` of each kind."""
    layout = Layout(("w",), ((SIDE, SIDE),), torch.float32, torch.device("meta"), Ranks(4))
    requests, idle = requests_on(spec, layout), Work(0.0, 1.0)
    others = [each for other in SPECS for each in requests_on(other, layout)]
    phases = (0.0,) * len(requests) + (decode / SIDE**2,)
    measured = Measured(
        Computation(idle, idle, idle, {"w": 0.0}, {"w": 0.0}),
        {"w": torch.empty(SIDE, SIDE, device="meta")},
        {spec: Arithmetic(phases, 1.0)},
        {each.kind: KindCost(LinkCost(latency(each.kind), 0.0), 0.0) for each in (*requests, *others)},
        copy=0.0,
        ranks=FOUR,
        cores=1.0,
        rings=True,
        by_need=True,
    )
    return predicted(measured, spec, "backward", ranks).step


@pytest.mark.parametrize(("spec", "grown"), [("int8", 1.0), ("int4", 1.0), ("topk:ratio=0.01", 64.0), ("bf16", 1.0)])
def test_decoding_grows_as_the_bytes_that_are_gathered(spec, grown):
    assert step_on(FOUR, spec, 1.0, lambda _: 0.0) == pytest.approx(1.0)
    assert step_on(Ranks(256), spec, 1.0, lambda _: 0.0) == pytest.approx(grown, rel=0.02)


LATENCY = {AllReduce: 6.0, AllToAll: 3.0, AllGather: 3.0}  # of four ranks around a ring: 1 a message


@pytest.mark.parametrize("spec", SPECS)
def test_a_latency_that_was_measured_with_bad_luck_is_not_multiplied_by_the_number_of_ranks(spec):
    def unlucky(kind):
        return {torch.bfloat16: 40.0, torch.float32: 6.0}.get(kind[1], LATENCY[kind[0]])

    here, far = (step_on(ranks, spec, 0.0, unlucky) for ranks in (FOUR, Ranks(10_000)))
    messages = {"topk:ratio=0.01": 1}.get(spec, 2)  # of a ring, by how many rounds there are around it
    assert far - here == pytest.approx(messages * (10_000 - 4), rel=1e-3)
