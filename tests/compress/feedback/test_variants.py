"""Options of error feedback: damping, momentum on the workers; for every lossy method, against float64."""

import dataclasses

import pytest
import torch

from gradwire.compress import Dense, ErrorFeedback, Simulation, WorkerMomentum, compressor, compressors
from gradwire.compress.protocol.registry import registered
from gradwire.compress.state.tree import Leaves
from gradwire.testing import held_back

from ..given import assert_goes_on_after_a_load, gradients, layout, mean
from ..test_laws import BITS, ROUNDING

LOSSY = [name for name in compressors() if registered[name].lossy and not name.startswith("shouting")]
SHAPES = ((64, 32), (7,), (13, 3, 3, 3), (1,), (5, 1))
OPTIONS = [
    "error_feedback=0.9",
    "error_feedback=0.5,start_iter=1",
    "momentum=0.9",
    "error_feedback=0.7,momentum=0.9",
    "momentum=0.5,start_iter=2,warmup=bf16",
]


class Oracle:
    """In float64: the mean over ranks of each rank's momentum, and of what damping has forgotten."""

    def __init__(self, options, within, kept):
        given = dict(option.split("=") for option in options.split(","))
        self.momentum, self.feedback = float(given.get("momentum", 0)), float(given.get("error_feedback", kept))
        self.velocities = [torch.zeros(within.numel, dtype=torch.float64) for _ in range(within.ranks.world_size)]

    def mean_input(self, gradients):
        """What the ranks compress, in the mean."""
        self.velocities = [self.momentum * u + g.double() for u, g in zip(self.velocities, gradients, strict=True)]
        return sum(u.to(gradients[0].dtype).double() for u in self.velocities) / len(gradients)

    def forgotten(self, held):
        return held * (1 / self.feedback - 1)


@pytest.mark.each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [*LOSSY, "fp16+powersgd"])
def test_conservation_what_goes_in_comes_out_is_held_back_or_is_forgotten_by_the_stated_part(name, options, dtype):
    rounds = "+" in name or ("momentum" in options and dtype == torch.bfloat16)  # u near the middle of two numbers
    unit = 2.0 ** -BITS["bf16"] if "warmup" in options else 2.0 ** -BITS["fp16"] if rounds else 0.0
    for world_size in (1, 3):
        bound = max((world_size + 1) * unit, 1e-5)  # each rank's number is rounded, and each of their sums
        within = layout(*SHAPES, dtype=dtype, world_size=world_size)
        asked = name in ROUNDING and "error_feedback" not in options
        spec = f"{name}:{options}" + (",error_feedback=true" if asked else "")
        kept = registered[name.rpartition("+")[2]].error_feedback or 1
        simulation, oracle = Simulation(compressor(spec), within), Oracle(options, within, kept)
        for step in range(4):
            given = gradients(within, step)
            before = held_back(simulation, within)
            outputs = simulation.step(given)
            assert all(torch.equal(output, outputs[0]) for output in outputs)
            entered, held = oracle.mean_input(given) + before, held_back(simulation, within)
            left = outputs[0].double() + held + oracle.forgotten(held)
            assert (entered - left).abs().max() <= bound * max(1.0, entered.abs().max())


@pytest.mark.parametrize("factor", [0.0, -0.5, 2.0, float("nan")])
def test_factors_of_feedback_that_are_no_part_are_refused(factor):
    with pytest.raises(ValueError, match="above 0 and up to 1, got"):
        ErrorFeedback(Dense(), kept=factor)


class TestWorkerMomentum:
    def test_without_compression_the_averages_are_the_momentum_of_torch_s_sgd(self):
        within, weight = layout((8, 6)), torch.zeros(8, 6, requires_grad=True)
        simulation = Simulation(WorkerMomentum(Dense(), 0.9), within)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        for step in range(5):
            weight.grad = mean(gradients(within, step)).view(8, 6)
            before = weight.detach().clone()
            optimizer.step()
            found = simulation.step(gradients(within, step))[0].view(8, 6)
            assert torch.allclose(found, before - weight.detach(), atol=1e-5)

    def test_momentum_is_not_held_back_and_is_rescaled_with_the_gradients(self):
        within = layout((8, 6), names=("w",))
        simulation = Simulation(WorkerMomentum(Dense(), 0.9), within)
        simulation.step(gradients(within))
        leaves = Leaves(simulation.states[0])
        assert leaves.held_back() == {}
        before = leaves.save()["w"]["velocity"]
        leaves.rescale(4.0)
        assert torch.equal(leaves.save()["w"]["velocity"], 4 * before)

    @pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, float("nan")])
    def test_what_is_no_momentum_is_refused(self, momentum):
        with pytest.raises(ValueError, match="between 0 and 1, got"):
            WorkerMomentum(Dense(), momentum)


@pytest.mark.parametrize("spec", ["topk:momentum=0.9,error_feedback=0.9", "int4:momentum=0.9"])
def test_what_is_remembered_is_saved_and_loaded_by_parameter(spec):
    assert_goes_on_after_a_load(compressor(spec), layout(*SHAPES, world_size=1))


def test_an_option_of_a_method_s_own_goes_before_the_wrapper_s_of_that_name():
    method = registered["topk"]
    own = dataclasses.make_dataclass("Own", [("momentum", float, 0.5)], frozen=True)
    options = dataclasses.replace(method, factory=own).options
    assert options["momentum"] == (float, 0.5)
    assert "error_feedback" in options
