import pytest

from gradwire import __version__
from gradwire.experiments.ranks.child import CommandFailure
from gradwire.experiments.sweep import command
from gradwire.experiments.sweep.points import Finished

from .given import STUDY


@pytest.fixture
def study(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return file


@pytest.fixture
def ran(monkeypatch):
    """The points that ran, each in no time; those in `fails` fail, those in `columns` have more columns."""

    class Ran(list):
        fails = ()

    found = Ran()
    found.columns = {}

    def stand_in(point, limit):
        found.append(point.chosen["elements"])
        if point.chosen["elements"] in found.fails:
            raise CommandFailure("ended with exit code 3: gradwire collective\nthe last line")
        row = {"elements": point.chosen["elements"], "backend": "gloo", "seconds.p50": 1 / point.chosen["elements"]}
        row |= found.columns.get(point.chosen["elements"], {})
        return Finished(point.arguments, point.chosen, [row], 0.1, "2026", __version__, {"cores": 2})

    monkeypatch.setattr(command, "run_point", stand_in)
    return found


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are files of a few bytes: to draw them takes longer than a study of these tests."""
    picture = pytest.importorskip("gradwire.experiments.sweep.picture")

    def stand_in(canvas, file):
        file.write_bytes(b"\x89PNG\r\n\x1a\n")
        return file

    monkeypatch.setattr(picture, "saved", stand_in)
