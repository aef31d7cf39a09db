import dataclasses
import math

import pytest

from gradwire.experiments.results.rows import milliseconds
from gradwire.experiments.results.table import DETAILS, HEADINGS, final_loss, rows, table

from ..given import results_of, run_of


def test_speed_is_relative_to_the_first_run():
    speeds = [row.figures[HEADINGS.index("speed-up")] for row in rows(results_of(run_of(), run_of("onebit", p50=0.04)))]
    assert speeds == ["1.00x", "2.50x"]


def test_the_final_loss_is_the_mean_of_the_last_tenth():
    assert final_loss(run_of(loss=range(20))) == pytest.approx(18.5)
    assert final_loss(run_of(loss=[5.0, 1.0])) == 1.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.0999, "99.9 ms"), (0.1, "100 ms"), (2.5, "2500 ms")],
)
def test_long_times_are_shown_in_whole_milliseconds(seconds, text):
    assert milliseconds(seconds) == text


def test_a_run_that_diverged_is_shown_as_nan():
    (row,) = rows(results_of(run_of(loss=(math.nan, math.nan), held_out=math.nan)))
    assert row.figures[HEADINGS.index("validation loss")] == "nan"


def test_the_table_has_a_row_for_each_run():
    shown = table(results_of(run_of(), run_of("onebit")))
    assert shown.row_count == 2
    assert [column.header.replace("\n", " ") for column in shown.columns] == ["compressor", *HEADINGS]


def test_planned_memory_stands_among_the_details_with_its_bytes_per_parameter():
    planned, unknown = dataclasses.replace(run_of(), planned_bytes=6560, planned_state_bytes=4000), run_of()
    found = [row.details[DETAILS.index("planned memory")] for row in rows(results_of(planned, unknown))]
    assert found == ["state 4.0 kB, peak 6.6 kB, 6.56 bytes per parameter", ""]
