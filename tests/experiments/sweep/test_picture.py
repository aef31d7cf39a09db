"""Pictures of studies: what is written on their axes, and that nothing is covered."""

import itertools

import pytest
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Text

from gradwire.experiments.sweep.figure import Figure
from gradwire.experiments.sweep.picture import draw


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """From a figure and rows to matplotlib's figure, as it would be saved."""

    def of(figure, rows):
        with monkeypatch.context() as patch:
            kept = []
            patch.setattr(Canvas, "savefig", lambda canvas, *args, **kwargs: kept.append(canvas))
            draw(figure, rows, "A title\nand another line", tmp_path)
        kept[0].canvas.draw()
        return kept[0]

    return of


def minor_labels(axes):
    return [text for tick in axes.yaxis.get_minor_ticks() if (text := tick.label1.get_text())]


@pytest.mark.parametrize(("highest", "labelled"), [(9, {"3", "4", "6"}), (9000, set())])
def test_small_ticks_of_a_logarithmic_axis_have_plain_numbers_where_there_is_room(highest, labelled, drawn):
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": highest}]
    (axes,) = drawn(Figure("loss", "line", "step", ["loss"], log=["y"]), rows).axes
    found = minor_labels(axes)
    assert labelled <= set(found)
    assert bool(found) == bool(labelled)
    assert all(float(text) > 0 for text in found)


def test_rates_across_a_line_stand_at_their_value(drawn):
    rows = [{"rate": rate, "speed": 1.0} for rate in ("10gbit", "500mbit", "1gbit")]
    (axes,) = drawn(Figure("speed", "line", "rate", ["speed"], labels={"x": "links"}), rows).axes
    assert list(axes.lines[0].get_xdata()) == pytest.approx([0.5, 1, 10])
    assert axes.get_xlabel() == "links, Gbit/s"


@pytest.mark.parametrize(("kind", "rates"), [("line", ["1gbit", "0"]), ("line", ["none", "1gbit"]), ("bar", ["1gbit"])])
def test_where_there_is_more_than_rates_and_under_bars_the_text_stays(kind, rates, drawn):
    (axes,) = drawn(Figure("speed", kind, "rate", ["speed"]), [{"rate": rate, "speed": 1.0} for rate in rates]).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == rates
    assert axes.get_xlabel() == "rate"


@pytest.mark.parametrize("kind", ["line", "bar", "box"])
def test_the_legend_covers_nothing(kind, drawn):
    seconds = [9.0, 9.0] if kind == "box" else 9.0
    rows = [{"hosts": 2, "spec": f"a-compressor:rank={rank}", "seconds": seconds} for rank in range(12)]
    canvas = drawn(Figure("step", kind, "hosts", ["seconds"], series=["spec"], log=["y"]), rows)
    (axes,), (legend,) = canvas.axes, [*canvas.legends, *filter(None, [canvas.axes[0].get_legend()])]
    below = legend.get_window_extent()
    assert not below.overlaps(axes.get_tightbbox())
    assert below.x0 >= 0
    assert below.x1 <= canvas.bbox.x1
    assert len(legend.get_texts()) == len(rows)
    assert axes.get_window_extent().height > canvas.bbox.height / 2


@pytest.mark.parametrize(("bounded", "bands"), [((1, 2), 1), ((), 0)])
def test_a_band_lies_around_those_points_that_have_its_bounds(bounded, bands, drawn):
    rows = [
        {"size": size, "speed": 2.0, **({"low": 1.0, "high": 3.0} if size in bounded else {})} for size in (1, 2, 3)
    ]
    (axes,) = drawn(Figure("speed", "line", "size", ["speed"], spread=["low", "high"]), rows).axes
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]
    assert len(axes.collections) == bands


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


def test_names_of_points_cover_neither_each_other_nor_points(drawn):
    rows = [
        {"spec": f"method:rank={n}", "sent": 1e6 * 1.1 ** (n % 5), "excess": 0.1 * (n // 5) - 0.1} for n in range(15)
    ]
    canvas = drawn(Figure("frontier", "points", "sent", ["excess"], series=["spec"], log=["x", "y"]), rows)
    (axes,) = canvas.axes
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    places = axes.transData.transform([(row["sent"], row["excess"]) for row in rows])
    assert [text.get_text() for text in axes.texts] == [
        row["spec"] for row in sorted(rows, key=lambda r: (r["sent"], r["excess"]))
    ]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert not any(box.contains(*place) for box in boxes for place in places)
    assert all(axes.get_window_extent().fully_containsx(box.x0) for box in boxes)


def test_the_line_joins_points_that_no_other_is_left_of_and_below(drawn):
    rows = [{"spec": s, "sent": x, "excess": y} for s, x, y in (("a", 1, 3), ("b", 2, 4), ("c", 3, 2), ("d", 4, 2.5))]
    (axes,) = drawn(Figure("frontier", "points", "sent", ["excess"], series=["spec"]), rows).axes
    frontier = next(line for line in axes.lines if line.get_linestyle() == "--")
    assert list(zip(*frontier.get_data(), strict=True)) == [(1, 3), (3, 2)]


def test_rows_are_chosen_by_one_value_or_by_a_list():
    rows = [{"spec": spec, "ranks": 2, "loss": 1.0} for spec in "abc"]
    figure = Figure("loss", "line", "ranks", ["loss"], where={"ranks": 2, "spec": ["a", "c"]})
    assert [row["spec"] for row in figure.shown(rows)] == ["a", "c"]
