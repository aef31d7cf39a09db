"""Names beside points, none of which lies on another."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

STEP = 9.0  # typographic points between the places that are tried
RINGS = 6
DIRECTIONS = ((1, 0.3), (1, -0.9), (-1, 0.3), (-1, -0.9), (0, 1), (0, -1.6), (1, 1), (-1, 1), (1, -2), (-1, -2))
ROOM = (0.18, 0.18)  # around the points, parts of their extent
MARK = 4.0  # pixels around a point that a name must leave free
EDGE = 4.0  # pixels inside the frame, likewise


def name_points(canvas: Canvas, axes: Axes, places: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """Write each name as near to its point as there is room, with a thin line to it."""
    canvas.draw_without_rendering()  # the layout is known from here on
    make_room(axes)
    marks = [Bbox.from_extents(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in axes.transData.transform(places)]
    taken = list(marks)
    for place, name in sorted(zip(places, names, strict=True), key=lambda each: each[0]):
        taken.append(_placed(axes, place, name, taken))


def make_room(axes: Axes) -> None:
    """Set limits with a part of the axes' size around what is drawn, whatever their scale."""
    drawn = axes.dataLim.transformed(axes.transData)
    around = drawn.expanded(1 + 2 * ROOM[0], 1 + 2 * ROOM[1]).transformed(axes.transData.inverted())
    limits = {"xlim": around.intervalx, "ylim": around.intervaly}
    axes.set(**{name: (low, high) for name, (low, high) in limits.items() if low != high})  # one point has its own room


def _placed(axes: Axes, place: tuple[float, float], name: str, taken: Sequence[Bbox]) -> Bbox:
    """Write a name at the first place that is free and inside the axes, or the last one tried; where it lies."""
    inside = axes.get_window_extent().padded(-EDGE)
    for ring in range(1, RINGS + 1):
        for right, up in DIRECTIONS:
            text = _written(axes, place, name, (right * ring * STEP, up * ring * STEP))
            box = _extent(text)
            within = inside.containsx(box.x0) and inside.containsx(box.x1) and inside.containsy(box.y0)
            if within and inside.containsy(box.y1) and not any(box.overlaps(other) for other in taken):
                return box
            text.remove()
    return _extent(_written(axes, place, name, (STEP, STEP)))


def _extent(text: Annotation) -> Bbox:
    """Where a name lies, without its line."""
    text.get_window_extent()  # finds its place
    return Text.get_window_extent(text)


def _written(axes: Axes, place: tuple[float, float], name: str, offset: tuple[float, float]) -> Annotation:
    side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
    return axes.annotate(
        name,
        place,
        offset,
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=7,
        arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2},
        in_layout=False,  # which stays as it was measured
    )
