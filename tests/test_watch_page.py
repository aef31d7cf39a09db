"""docs/watch.md: its thresholds are the program's, and values on both sides of them are judged as it says."""

import json
import math
import re

import pytest

from gradwire.compress.state import gauge
from gradwire.compress.state.gauge import Sample, Seen, steady, stride
from gradwire.ddp_core.measure.stats import RECENT
from gradwire.experiments import top
from gradwire.hooks.watching import watch

from .test_docs import PAGES, ROOT

PAGE = PAGES["docs/watch.md"]
WORDS = {"twice": 2.0, "two": 2.0, "three": 3.0}
THRESHOLDS = [
    (r"means over the last (\w+) steps", RECENT),
    (r"come from one step in (\w+),", gauge.EVERY),
    (r"takes a sample every (\d+)th step", gauge.EVERY),
    (r"every (\d+)th step: exact", gauge.EVERY),
    (r"If\s(\w+) reports in a row", watch.IN_A_ROW),
    (r"more than (\w+) % faster", 100 * (1 - watch.MARGIN)),
    (r"in (\w+) samples in a row", gauge.IN_A_ROW),
    (r"more than ([\d.]+)x as long as the median rank", top.STRAGGLES),
    (r"older than (\w+) intervals", top.STALE),
    (r"intervals and (\w+) s,", top.LEAST),
    (r"from about (\w+) elements per bucket", gauge.ELEMENTS),
    (r"buckets below (\w+) elements", next(size for size in range(1, 10**5) if stride(size) > 1)),
]


def numbers(pattern):
    """The numbers of a sentence or a row that is there once."""
    (found,) = re.findall(pattern, PAGE)
    return [WORDS.get(each) or float(each) for each in ([found] if isinstance(found, str) else found)]


@pytest.mark.parametrize(("pattern", "expected"), THRESHOLDS, ids=[pattern for pattern, _ in THRESHOLDS])
def test_a_number_of_the_page_is_the_program_s(pattern, expected):
    assert numbers(pattern) == [pytest.approx(expected)]


def test_the_residuals_to_expect_are_those_of_their_cosines():
    rows = re.findall(r"^\| (0\.\d+) \| ([\d.]+)x \|", PAGE, re.MULTILINE)
    assert len(rows) == 6
    assert [residual for cosine, residual in rows if abs(steady(float(cosine)) - float(residual)) > 0.05] == []


def sample(ratio, cosine, log_gradient=0.0):
    """A sample in which the intended and the sent update have the length 1."""
    return Sample(log_gradient, ratio**2, cosine, 1.0, 1.0)


def warns(*samples):
    """True if gradwire warns of error feedback after one of these samples."""
    seen = Seen()
    return any((seen := seen.and_then(each)).runs_away for each in samples)


GOOD = sample(1.0, 0.7)


def after(steps):
    """The samples of good steps, of which the next sample is the first one that counts."""
    return [GOOD] * (int(steps) // gauge.EVERY - 1)


def test_a_residual_beyond_both_limits_in_two_samples_in_a_row_warns():
    limit, times, steps = numbers(
        r"ratio above (\d+)x and above (\w+) the expected one, after the first (\d+) steps \| error feedback diverges"
    )
    cosine = 1 / (1 + (limit / times) ** 2) ** 0.5  # at which both limits are the same
    large, small = sample(1.01 * limit, cosine), sample(0.99 * limit, cosine)
    assert warns(*after(steps), large, large)
    assert not warns(*after(steps), large, GOOD, large)
    assert not warns(*after(steps)[1:], large, large)
    assert not warns(*after(steps), small, small)
    assert not warns(*after(steps), *[sample(1.01 * limit, 0.9 * cosine)] * 2), "above 8x, but not twice the expected"
    assert not warns(*after(steps), *[sample(0.99 * limit, 0.99)] * 2), "twice the expected, but not above 8x"


def test_a_large_residual_with_a_cosine_of_0_or_below_warns():
    limit, steps = numbers(r"ratio above (\d+)x, with a cosine of 0 or below, after the first (\d+) steps \|")
    for cosine in (0.0, -0.5):
        assert warns(*after(steps), *[sample(1.01 * limit, cosine)] * 2)
        assert not warns(*after(steps), *[sample(0.99 * limit, cosine)] * 2)


def test_gradients_that_grow_with_a_residual_warn_at_once():
    limit, times = numbers(r"ratio above (\d+)x, while the gradient exceeds (\d+) times its recent geometric mean")
    grown = 10 * times  # the first of the two samples is a part of the mean for the second one
    assert warns(GOOD, *[sample(1.01 * limit, 0.7, math.log(grown))] * 2)
    assert not warns(GOOD, *[sample(0.99 * limit, 0.7, math.log(grown))] * 2)
    assert not warns(GOOD, *[sample(1.01 * limit, 0.7, math.log(0.99 * times))] * 2)


def test_the_lines_that_pages_show_are_those_of_the_measured_runs():
    measured = json.loads((ROOT / "docs/benchmarks/watch-lines.json").read_text("utf-8"))["lines"]
    shown = [line for text in PAGES.values() for line in re.findall(r"^step \d+ \| .*", text, re.MULTILINE)]
    assert len(shown) == 3 + 4 + 3  # README, two-hosts, watch
    assert {*shown} <= {line for lines in measured.values() for line in lines}
    assert "Above, 376.1 ms become 154.6 ms" in PAGE
    assert [float(re.search(r"([\d.]+) ms", measured[name][-1])[1]) for name in ("none", "int4")] == [376.1, 154.6]
