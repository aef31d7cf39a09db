"""A compressor by parameter."""

import pytest
import torch

from gradwire.compress import Dense, ErrorFeedback, Gathered, Partition, PowerSGD, Simulation, TopK

from ..given import RANKS, Scaled, gradients, layout

NAMES = ("layer.weight", "layer.bias", "head.weight", "head.bias")


def rules():
    return Partition((("*.bias", Scaled(2.0)), ("head.*", Scaled(3.0))), Scaled(1.0))


def test_the_first_rule_that_matches_a_name_decides_else_otherwise():
    within = layout((2, 2), (2,), (3,), (1,), names=NAMES)
    (out, _) = Simulation(rules(), within).step([torch.ones(10)] * RANKS)
    assert out.tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 3, 2]


@pytest.mark.parametrize("names", [("a.bias", "b.bias"), ("x", "y"), ("head.a", "head.b")], ids=str)
def test_groups_without_members_take_no_part(names):
    within = layout((2,), (3,), names=names)
    simulation = Simulation(rules(), within)
    assert len(simulation.step(gradients(within))) == RANKS
    assert sum(bool(places) for places in simulation.states[0].places) == 1


def test_groups_that_send_alike_share_one_collective():
    within = layout((2, 2), (2,), (3,), (1,), names=NAMES)
    program = rules().reduce(torch.ones(10), rules().init(within))
    assert next(program).tensor.numel() == 10
    with pytest.raises(StopIteration):
        program.send(torch.ones(10))


def test_each_parameter_gets_what_its_compressor_gives_alone():
    within = layout((8, 6), (5,), (7, 9), names=("a", "b", "c"))
    split = Partition((("a", PowerSGD(rank=1, min_compression_rate=0)), ("b", Dense())), Gathered(TopK(k=4)))
    whole = Simulation(ErrorFeedback(split), within)
    alone = {
        name: Simulation(ErrorFeedback(inner), layout(shape, names=(name,)))
        for name, shape, inner in zip("abc", within.shapes, [split.rules[0][1], Dense(), split.otherwise], strict=True)
    }
    for step in range(3):
        given = gradients(within, step)
        views = [within.views(gradient) for gradient in given]
        for name, out in within.views(whole.step(given)[0]).items():
            expected = alone[name].step([view[name].reshape(-1) for view in views])[0]
            assert torch.equal(out.reshape(-1), expected)
