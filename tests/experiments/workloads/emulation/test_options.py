import pytest

from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.network.link import shown_rate
from gradwire.experiments.workloads.emulation import EmulationConfig


@pytest.mark.parametrize(
    ("rate", "slower"),
    [("100mbit", "25 Mbit/s"), ("1gbit", "250 Mbit/s"), ("1.5 Gbit/s", "375 Mbit/s"), ("1tbit", "250 Gbit/s")],
)
def test_networks_are_as_slow_as_the_dilation_makes_them(rate, slower):
    lab = EmulationConfig(compute="emulate:vgg19", dilate=4, netlab=NetlabConfig(hosts=2, rate=rate))
    assert lab.slowed_netlab.described == f"2 hosts at {slower}"
    assert lab.slowed_link is None
    wan = NetlabConfig(hosts=2, rate=rate, down=rate, delay="1.5ms", jitter="2us", loss="1%")
    slowed = EmulationConfig(compute="emulate:vgg19", dilate=4, netlab=wan).slowed_netlab
    assert slowed.described == f"2 hosts at {slower}, delay 6 ms, jitter 0.008 ms, loss 1 %"
    link = EmulationConfig(compute="emulate:vgg19", dilate=4, link=rate)
    assert shown_rate(link.slowed_link) == slower
    assert link.slowed_netlab.described == "0 hosts without limits"
