"""Between two steps: feedback that runs away is told once, with the bucket's first parameter."""

import warnings
from types import SimpleNamespace

import pytest

from gradwire.compress.state.gauge import EVERY
from gradwire.ddp_core.averaging.step_checks import StepChecks


class Memory:
    """As much of a model's memory as is looked at: one bucket, with what its gauge says."""

    def __init__(self, runs_away=True, guard=None):
        gauge = SimpleNamespace(guard=guard, runs_away=runs_away, residual_ratio=12.0, cosine=0.25)
        self.step, self.counts, self.ended = 0, True, 0
        self.live = [(("layer.weight",), SimpleNamespace(gauge=None)), (("head.bias",), SimpleNamespace(gauge=gauge))]

    def end_step(self):
        self.ended += 1


def looked_at(memory, steps):
    """The warnings of so many steps."""
    checks = StepChecks()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for memory.step in range(1, steps + 1):
            checks.end_step(memory)
    assert memory.ended == steps
    return [str(each.message) for each in told]


def test_feedback_that_runs_away_is_told_once():
    assert not looked_at(Memory(), EVERY - 1)
    (text,) = looked_at(Memory(), 3 * EVERY)
    assert text.startswith("error feedback diverges in the bucket of head.bias: the residual is 12x the gradient")
    assert "sent update 0.25" in text
    assert "guard=true" in text


@pytest.mark.parametrize("memory", [Memory(runs_away=False), Memory(guard="damps")])
def test_feedback_that_is_well_or_guarded_is_not(memory):
    assert not looked_at(memory, 3 * EVERY)
