import pytest

from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.points import POINTS, Finished, append_point, points_of, read_points


def test_the_points_are_the_product_of_the_grid_in_order():
    config = SweepConfig(
        command="compare", base={"model": {"name": "mlp", "width": 16}}, grid=[{"lr": [1, 2], "seed": [3, 4]}]
    )
    points = points_of(config)
    assert [tuple(point.chosen.values()) for point in points] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert points[0].arguments == ["compare", "--model.name=mlp", "--model.width=16", "--lr=1", "--seed=3"]
    assert len({point.key for point in points}) == 4


def test_a_point_is_known_by_its_command_line_in_any_order():
    first, second = (
        points_of(SweepConfig(command="compare", base=base))[0]
        for base in ({"lr": 3, "steps": 5}, {"steps": 5, "lr": 3})
    )
    assert first.arguments != second.arguments
    assert first.key == second.key != points_of(SweepConfig(command="compare", base={"lr": 3}))[0].key


def test_several_grids_come_one_after_the_other_each_with_options_of_its_own():
    grids = [{"model": ["mlp"], "data": "digits", "lr": 1, "seed": [0, 1]}, {"model": ["gpt"], "lr": 2, "seed": [0]}]
    config = SweepConfig(command="compare", base={"lr": 3, "steps": 5}, grid=grids)
    points = points_of(config)
    assert [point.label for point in points] == ["model mlp, seed 0", "model mlp, seed 1", "model gpt, seed 0"]
    assert [(p.given["model"], p.given["lr"], p.given["steps"]) for p in points[1:]] == [("mlp", 1, 5), ("gpt", 2, 5)]


def chosen(**options):
    return [tuple(point.chosen.values()) for point in points_of(SweepConfig(command="compare", **options))]


GRID = {"seed": [0, 1], "nproc": [2, 4]}


def test_what_is_asked_for_alone_is_run():
    assert chosen(grid=[GRID], only={"seed": 1}) == [(1, 2), (1, 4)]
    assert chosen(grid=[GRID], only={"seed": 1, "nproc": [4]}) == [(1, 4)]


def test_a_part_that_the_grid_does_not_have_is_refused():
    with pytest.raises(ValueError, match="only names options of the grid, seed, nproc; got sed"):
        chosen(grid=[GRID], only={"sed": 1})
    with pytest.raises(ValueError, match="no place of the grid"):
        chosen(grid=[GRID], only={"seed": [7]})


def test_a_line_that_a_crash_cut_short_is_left_out_and_does_not_spoil_the_next(tmp_path, caplog):
    whole = [Finished([key], {}, [], 1.0, "2026", "0.1.0", {}) for key in "abc"]
    append_point(tmp_path, whole[0])
    append_point(tmp_path, whole[1])
    text = (tmp_path / POINTS).read_text()
    (tmp_path / POINTS).write_text(text[:-20])
    assert [point.arguments for point in read_points(tmp_path).values()] == [["a"]]
    assert "line 2 is left out" in caplog.text
    append_point(tmp_path, whole[2])
    assert [point.arguments for point in read_points(tmp_path).values()] == [["a"], ["c"]]


def test_what_a_file_keeps_of_a_row_is_rounded_and_curves_are_whole_again(tmp_path):
    row = {
        "loss": [2.345678, None],
        "step": [1, 2],
        "eval.loss": 2.34567891,
        "sent_bytes": 37848576.0,
        "seconds": [0.1234567],
    }
    append_point(tmp_path, Finished(["a"], {}, [row], 1.0, "2026", "0.1.0", {}))
    assert '"step"' not in (tmp_path / POINTS).read_text()
    [[kept]] = [point.rows for point in read_points(tmp_path).values()]
    assert kept == {
        "loss": [2.3457, None],
        "step": [1, 2],
        "eval.loss": 2.34568,
        "sent_bytes": 37848576,
        "seconds": [0.12346],
    }
