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


@pytest.mark.parametrize("kind", ["line", "bar"])
def test_the_legend_covers_nothing(kind, drawn):
    rows = [{"hosts": 2, "spec": f"a-compressor:rank={rank}", "seconds": 9.0} for rank in range(12)]
    canvas = drawn(Figure("step", kind, "hosts", ["seconds"], series=["spec"], log=["y"]), rows)
    (axes,), (legend,) = canvas.axes, [*canvas.legends, *filter(None, [canvas.axes[0].get_legend()])]
    below = legend.get_window_extent()
    assert not below.overlaps(axes.get_tightbbox())
    assert below.x0 >= 0
    assert below.x1 <= canvas.bbox.x1
    assert len(legend.get_texts()) == len(rows)
    assert axes.get_window_extent().height > canvas.bbox.height / 2


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


def test_bounds_belong_to_lines():
    with pytest.raises(ValueError, match="bounds are curves of a line, and its kind is bar"):
        Figure("speed", "bar", "rate", ["speed"], bounds={"best": "bound"})


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


def test_columns_and_values_are_in_words(drawn):
    rows = [
        {"overlap": overlap, "ddp": ddp, "part.forward": 1.0, "part.exposed": 2.0}
        for overlap in (False, True)
        for ddp in ("a", "b")
    ]
    (axes,) = (
        canvas := drawn(Figure("parts", "bar", "overlap", ["part.forward", "part.exposed"], series=["ddp"]), rows)
    ).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["no", "yes"]
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["forward", "exposed"]
    rows = [
        {"step": 1, "overlap": overlap, "sync_every": 4, "netlab.rate": "1gbit", "loss": 1.0}
        for overlap in (False, True)
    ]
    canvas = drawn(Figure("loss", "line", "step", ["loss"], series=["overlap", "sync_every", "netlab.rate"]), rows)
    names = [text.get_text() for text in canvas.legends[0].get_texts()]
    assert names == ["without overlap, sync every 4, 1 Gbit/s", "with overlap, sync every 4, 1 Gbit/s"]
