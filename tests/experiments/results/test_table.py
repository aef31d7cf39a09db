import math

import pytest

from gradwire.experiments.results.table import HEADINGS, final_loss, rows

from ..given import results_of, run_of


def test_speed_is_relative_to_the_first_run():
    speeds = [row.figures[HEADINGS.index("speed-up")] for row in rows(results_of(run_of(), run_of("onebit", p50=0.04)))]
    assert speeds == ["1.00x", "2.50x"]


def test_the_final_loss_is_the_mean_of_the_last_tenth():
    assert final_loss(run_of(loss=range(20))) == pytest.approx(18.5)
    assert final_loss(run_of(loss=[5.0, 1.0])) == 1.0


def test_a_run_that_diverged_is_shown_as_nan():
    (row,) = rows(results_of(run_of(loss=(math.nan, math.nan), held_out=math.nan)))
    assert row.figures[HEADINGS.index("validation loss")] == "nan"
