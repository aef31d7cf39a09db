import pytest

from gradwire.experiments.network.lab.utilization import Utilization
from gradwire.experiments.sweep.rows import link_use, rows_of


def test_rows_of_bench_and_compare_are_flat_and_know_their_place_on_the_grid():
    measured = {"sec_per_iter": {"p50": 0.5}}
    bench = {"rows": [{"model": "mlp", "compressor": "none", "measurements": measured}]}
    chosen = {"compressors": "none", "link": "1gbit"}
    assert rows_of("bench", bench, chosen) == [
        {"link": "1gbit", "model": "mlp", "compressor": "none", "sec_per_iter.p50": 0.5}
    ]
    with pytest.raises(ValueError, match="bench measured nothing"):
        rows_of("bench", {"rows": []}, {})


def test_the_use_of_a_link_is_that_of_the_last_two_steps():
    seconds = [index / 10 for index in range(11)]
    sent = [0, 0, 12500, 12500, 37500, 62500, 62500, 75000, 75000, 75000, 75000]
    use = Utilization("2 hosts at 8mbit", "8mbit", 0.0, seconds, {"0": {"sent_bytes": sent}})
    [row] = link_use([{"sec_per_iter.p50": 0.2}], use)
    assert row["link.seconds"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert row["link.sent_mbit"] == pytest.approx([0, 2, 2, 0, 1])
    with pytest.raises(ValueError, match="one setting a point, and here are 2: put them in the grid"):
        link_use([{}, {}], use)
