"""Pictures of studies: what is drawn, and that nothing is covered."""

import pytest

from gradwire.experiments.sweep import picture
from gradwire.experiments.sweep.config import Figure
from gradwire.experiments.sweep.picture import draw


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """From a figure and rows to matplotlib's figure, as it would be saved."""

    def of(figure, rows):
        with monkeypatch.context() as patch:
            kept = []
            patch.setattr(picture, "saved", lambda canvas, file: kept.append(canvas))
            draw(figure, rows, "A title\nand another line", tmp_path)
        kept[0].draw_without_rendering()
        return kept[0]

    return of


def test_bounds_are_a_curve_each_whatever_series_there_are(drawn):
    rows = [
        {"rate": rate, "order": order, "speed": 1.0, "best": 10.0 * rate, "waiting": 5.0}
        for order in ("backward", "priority")
        for rate in (2, 1)
    ]
    bounds = {"at best": "best", "if all waits": "waiting"}
    (axes,) = drawn(Figure("speed", "line", "rate", ["speed"], series=["order"], bounds=bounds), rows).axes
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert list(curves) == ["backward", "priority", *bounds]
    assert curves["at best"] == ([1, 2], [10, 20])
    assert curves["if all waits"] == ([1, 2], [5, 5])


def test_points_that_no_other_is_left_of_and_below_have_a_line_and_their_names(drawn):
    rows = [{"spec": s, "sent": x, "excess": y} for s, x, y in (("a", 1, 3), ("b", 2, 4), ("c", 3, 2), ("d", 4, 2.5))]
    (axes,) = drawn(Figure("frontier", "points", "sent", ["excess"], series=["spec"]), rows).axes
    frontier = next(line for line in axes.lines if line.get_linestyle() == "--")
    assert list(zip(*frontier.get_data(), strict=True)) == [(1, 3), (3, 2)]
    assert [text.get_text() for text in axes.texts] == ["a", "c"]


def test_rows_are_chosen_by_one_value_or_by_a_list():
    rows = [{"spec": spec, "ranks": 2, "loss": 1.0} for spec in "abc"]
    figure = Figure("loss", "line", "ranks", ["loss"], where={"ranks": 2, "spec": ["a", "c"]})
    assert [row["spec"] for row in figure.shown(rows)] == ["a", "c"]
