"""The laws of gradwire.testing hold for our compressors, and fail for one that breaks each of them."""

from dataclasses import dataclass

import pytest
import torch

from gradwire import testing
from gradwire.compress import all_reduce

LAYERS = testing.bucket(testing.SHAPES["layers"])


@pytest.mark.parametrize("spec", ["none", "int4:error_feedback=1,rounding=stochastic", "onebit:error_feedback=1"])
def test_compressors_of_ours_keep_all_laws(spec):
    testing.check_laws(spec)


@dataclass
class Counter:
    """A state that is not saved."""

    value: int = 0


@dataclass(frozen=True)
class Broken:
    """The mean of all ranks, but for one fault."""

    fault: str

    def init(self, layout):
        return Counter(layout.ranks.rank * (self.fault == "by rank"))

    def reduce(self, grad, state, residual=None):
        state.value += 1
        if self.fault == "random":
            grad += torch.rand(())
        if self.fault == "hidden":
            grad[-1:].nan_to_num_(0, 0, 0)  # the last parameter
        sent = grad[: int(grad.count_nonzero())] if self.fault == "values" else grad
        average = yield from all_reduce(sent, "mean")
        if self.fault == "leak":
            average *= 0.98
        if self.fault in ("no zeros", "not finite"):
            average /= 0 * average.sum() if self.fault == "not finite" else average.abs().max()
        if self.fault in ("forgets", "by rank"):
            average += 1e-3 * state.value
        return average if self.fault != "values" else torch.cat([average, grad[average.numel() :]])


@pytest.mark.parametrize(
    ("fault", "law", "message"),
    [
        ("leak", testing.check_conservation, "neither in the average nor in a residual"),
        ("by rank", testing.check_conservation, "ranks got different averages"),
        ("leak", testing.check_telescoping, "should fall as 1/T"),
        ("no zeros", testing.check_zeros, "the average of zeros has"),
        ("not finite", testing.check_conservation, "of finite gradients is not finite"),
        ("hidden", testing.check_not_finite, "does not show in the average of ranks"),
        ("values", testing.check_traffic, "values change the bytes"),
        ("random", testing.check_private, "two runs from the same start differ"),
        ("forgets", testing.check_resume, "after a resume"),
    ],
)
def test_each_law_fails_where_a_compressor_breaks_it(fault, law, message):
    with torch.random.fork_rng(), pytest.raises(AssertionError, match=message):
        law(Broken(fault), LAYERS)


def test_options_that_are_wrong_are_refused():
    with pytest.raises(ValueError, match="'int4' has no option 'bloc'"):
        testing.check_laws("int4:bloc=3")
