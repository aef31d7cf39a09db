import pytest

from gradwire.experiments.results.table import HEADINGS, rows, table
from gradwire.experiments.results.time_to_loss import reference, times_to_loss

from ..given import results_of, run_of

SLOWLY, AT_ONCE = (4.0, 4.0, 4.0, 4.0, 1.0), (1.0,) * 5


def times(*runs):
    return times_to_loss(results_of(*runs))


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["none", "fp16", "bf16"], "bf16"),
        (["none", "topk", "fp16"], "fp16"),
        (["topk", "none"], "none"),
        (["topk"], None),
    ],
)
def test_what_users_have_anyway_is_to_be_reached(specs, expected):
    found = reference(results_of(*map(run_of, specs)))
    assert (found and found.compressor) == expected


def test_a_run_that_is_there_at_once_is_there_after_one_step():
    assert times(run_of("bf16", loss=SLOWLY, p50=1.0), run_of("topk", loss=AT_ONCE, p50=0.5)) == [5.0, 0.5]


def test_a_run_that_never_gets_there_has_no_time():
    assert times(run_of("bf16", loss=AT_ONCE), run_of("topk", loss=(1.04,) * 5)) == [0.1, None]


def test_three_per_cent_above_is_near_enough():
    assert times(run_of("bf16", loss=AT_ONCE), run_of("topk", loss=(1.029,) * 5)) == [0.1, 0.1]


def test_without_an_uncompressed_run_there_is_nothing_to_reach():
    assert times(run_of("topk"), run_of("onebit")) == [None, None]
    assert table(results_of(run_of("topk"))).caption == ""


def test_the_table_shows_the_times_and_says_what_they_are():
    results = results_of(run_of("bf16", loss=AT_ONCE), run_of("topk", loss=(2.0,) * 5))
    assert [row.figures[HEADINGS.index("time to loss")] for row in rows(results)] == ["0.1 s", "never"]
    assert "within 3% of what bf16 ends with" in table(results).caption
