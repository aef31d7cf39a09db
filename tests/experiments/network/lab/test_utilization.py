import dataclasses
import json

import pytest

from gradwire.experiments.network.lab.picture import draw
from gradwire.experiments.network.lab.utilization import Utilization

from .given import SILENT, USE


def test_utilization_is_in_mbit_a_second_of_what_was_counted_between_two_looks(tmp_path):
    assert USE.rates(0, "sent_bytes") == pytest.approx([0, 8, 4, 0])
    assert USE.busy(0) == (0.01, 0.04)


def test_a_link_without_traffic_is_drawn_too(tmp_path):
    assert draw(SILENT, tmp_path / "use.png") == tmp_path / "use.png"
    assert (tmp_path / "use.png").stat().st_size > 1000


def test_what_is_written_is_read_again(tmp_path):
    USE.write(tmp_path / "use.json")
    assert Utilization.read(tmp_path / "use.json") == USE
    (tmp_path / "other.json").write_text(json.dumps(dataclasses.asdict(USE)))
    with pytest.raises(ValueError, match="no file of --utilization"):
        Utilization.read(tmp_path / "other.json")
