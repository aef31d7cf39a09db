import statistics

import pytest

from gradwire.experiments.sweep.mean import means


def rows(**columns):
    count = len(next(iter(columns.values())))
    return [{"spec": "int8", "seed": seed, **{k: v[seed] for k, v in columns.items()}} for seed in range(count)]


def test_numbers_become_their_mean_and_standard_deviation():
    losses = [1.0, 2.0, 4.5]
    (found,) = means(rows(loss=losses), ["seed"], ["spec", "seed"], [])
    assert found == {
        "spec": "int8",
        "loss": pytest.approx(sum(losses) / 3),
        "loss.spread": pytest.approx(statistics.stdev(losses)),
        "runs": 3,
    }


def test_curves_that_are_drawn_are_averaged_and_others_left_out():
    (found,) = means(rows(loss=[[1.0, 2.0], [3.0, None]], seconds=[[1.0], [2.0]]), ["seed"], ["spec"], ["loss"])
    assert found == {"spec": "int8", "loss": [2.0, None], "runs": 2}


def test_places_of_the_grid_stay_apart_and_in_order():
    given = [{"spec": spec, "seed": seed, "loss": 1.0} for seed in (0, 1) for spec in ("b", "a")]
    assert [(row["spec"], row["runs"]) for row in means(given, ["seed"], ["spec", "seed"], [])] == [("b", 2), ("a", 2)]


def test_what_one_row_lacks_the_mean_lacks():
    (found,) = means(rows(loss=[1.0, None], time=[None, None]), ["seed"], ["spec"], [])
    assert found["loss"] is None
    assert "loss.spread" not in found
    assert found["time"] is None
