"""docs/watch.md: its thresholds are the program's, and its lines those of measured runs."""

import json
import re

import pytest

from gradwire.compress.state import gauge
from gradwire.compress.state.gauge import steady, stride
from gradwire.ddp_core.measure.stats import RECENT
from gradwire.ddp_core.watching import watch
from gradwire.experiments import top

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
    (r"ratio above (\d+)x and above twice", gauge.MANY),
    (r"ratio above 8x and above (\w+) the expected one", gauge.BEYOND),
    (r"expected one, after the first (\d+) steps", gauge.WARM_UP * gauge.EVERY),
    (r"ratio above (\d+)x, with a cosine of 0 or below", gauge.MANY),
    (r"the gradient exceeds (\d+) times its recent geometric mean", gauge.GROWN),
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


def test_the_lines_that_pages_show_are_those_of_the_measured_runs():
    measured = json.loads((ROOT / "docs/benchmarks/watch-lines.json").read_text("utf-8"))["lines"]
    shown = [line for text in PAGES.values() for line in re.findall(r"^step \d+ \| .*", text, re.MULTILINE)]
    assert len(shown) == 3 + 4 + 3  # README, two-hosts, watch
    assert {*shown} <= {line for lines in measured.values() for line in lines}
    assert "Above, 376.1 ms become 154.6 ms" in PAGE
    assert [float(re.search(r"([\d.]+) ms", measured[name][-1])[1]) for name in ("none", "int4")] == [376.1, 154.6]
