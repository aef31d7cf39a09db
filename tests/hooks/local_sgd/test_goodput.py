"""Work that ends in the model while sites are killed, paused or slow: gradwire's meetings on a simulated clock."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "docs" / "benchmarks"


@pytest.fixture
def simulated(monkeypatch):
    """What docs/benchmarks/goodput_sites.py finds in an hour or so."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("goodput_sites")
    return lambda name, **options: script.World(replace(script.CASES[name], **options), 0).run()


def test_without_accidents_all_work_of_eight_sites_ends_in_the_model(simulated):
    found = simulated("nothing happens", hours=1.0)
    turns = 3600 // 16  # each 16 steps of a second, in which a fragment is averaged
    assert found["rounds"] in (turns - 1, turns - 2)  # the last is on its way
    assert 1 - 64 / 3600 - 0.01 < found["goodput"] <= 1
    assert found["longest_wait"] == found["waited"] == 0


@pytest.mark.parametrize(
    "name", ["killed once in 30 min", "killed once in 4 h, paused once in 1 h", "all of this, every_seconds"]
)
@pytest.mark.parametrize("grace", [2.0, 5.0])
def test_once_most_sites_have_come_the_others_wait_no_longer_than_the_grace_and_most_work_counts(
    simulated, name, grace
):
    found = simulated(name, hours=2.0, grace=grace)
    assert found["longest_wait"] <= grace + 1e-3
    assert found["rounds_again"] > 0
    assert found["goodput"] > 0.88


def test_a_slow_site_s_work_counts_where_sites_average_by_seconds(simulated):
    assert simulated("one site is half as fast, every", hours=1.0)["goodput"] < 7 / 7.5 + 0.01
    assert simulated("one site is half as fast, every_seconds", hours=1.0)["goodput"] > 0.97
