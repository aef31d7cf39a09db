import pytest

from gradwire.experiments.workloads.emulation import chosen_trace, emulated
from gradwire.experiments.workloads.emulation.options import check_dilation, dilated, labels

from .given import TRACE


def test_compute_dilation_and_their_labels():
    assert chosen_trace("real") is None
    assert labels(None) == []
    trace = chosen_trace("emulate:vgg19@0.5")
    assert labels(trace) == ["emulated compute vgg19, 0.5 s per step"]
    assert labels(trace, 4) == ["emulated compute vgg19, 0.5 s per step", "dilated 4"]
    assert [dilated(rate, 4) for rate in ("100mbit", "1gbit", "1.5 Gbit/s", "0")] == [
        "25mbit",
        "0.25gbit",
        "0.375Gbit/s",
        "0",
    ]
    with pytest.raises(ValueError, match="compute is real, or emulate: and a trace"):
        chosen_trace("emulated")
    with pytest.raises(ValueError, match="such as 100mbit"):
        dilated("fast", 2)
    with pytest.raises(ValueError, match="needs an emulated accelerator"):
        check_dilation(2, "real")
    for bad in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            check_dilation(bad, "emulate:vgg19")
        with pytest.raises(ValueError, match="above 0"):
            emulated(TRACE, bad)
