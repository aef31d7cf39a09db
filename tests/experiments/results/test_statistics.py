import numpy as np
import pytest

from gradwire.experiments.results.statistics import percentiles, smoothed


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpy_s(count):
    seconds = np.random.default_rng(0).exponential(size=count)
    found = percentiles(seconds.tolist())
    for name, share in (("p50", 50), ("p75", 75), ("p90", 90), ("p95", 95)):
        assert found[name] == pytest.approx(np.percentile(seconds, share), rel=1e-12)


def test_smoothing_keeps_a_constant_and_follows_a_change():
    assert smoothed((2.0,) * 5) == pytest.approx([2.0] * 5)
    falling = smoothed((1.0, 0.0, 0.0, 0.0))
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)
