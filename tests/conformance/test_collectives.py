"""torch's own tests of collectives on a default group that `compress_group` has taken over, as docs/conformance.md says."""

import re

import pytest

from .test_upstream import PAGE

SECTION = PAGE.read_text().partition("## Collectives\n")[2].partition("\n## ")[0]
PASSING = re.findall(r"^test_\w+$", SECTION, re.MULTILINE)
HANDFUL = {"test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_gather", "test_sparse_all_reduce_sum"}
WAYS = ("above", pytest.param("off", marks=pytest.mark.slow))  # min_bytes above all sizes; inside `off()`


def test_the_page_has_the_cases_that_always_run():
    assert set(PASSING) >= HANDFUL


@pytest.mark.timeout(500)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case", [case if case in HANDFUL else pytest.param(case, marks=pytest.mark.conformance) for case in PASSING]
)
def test_a_case_passes_on_a_group_that_is_taken_over(outcome_of, case, way):
    found, detail = outcome_of(case, "torch", "cpu", GRADWIRE_CONFORMANCE_COLLECTIVES=way)
    assert found == "passes", detail
