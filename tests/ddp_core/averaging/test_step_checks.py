"""Between two steps: feedback that runs away is told once, with the bucket's first parameter."""

import warnings
from types import SimpleNamespace

from gradwire.ddp_core.averaging.step_checks import DivergenceCheck


def buckets(runs_away=True):
    """As much of a model's memory as is looked at: one bucket, with what its gauge says."""
    gauge = SimpleNamespace(runs_away=runs_away, residual_ratio=12.0, cosine=0.25)
    return [(("layer.weight",), SimpleNamespace(gauge=None)), (("head.bias",), SimpleNamespace(gauge=gauge))]


def looked_at(live, times=3):
    """The warnings of so many checks."""
    check = DivergenceCheck()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(times):
            check.check(live)
    return [str(each.message) for each in told]


def test_feedback_that_runs_away_is_told_once():
    (text,) = looked_at(buckets())
    assert text.startswith("error feedback diverges in the bucket of head.bias: the residual is 12x the gradient")
    assert "sent update 0.25" in text
    assert "start_iter=" in text


def test_feedback_that_is_well_is_not():
    assert not looked_at(buckets(runs_away=False))
