import pytest

from gradwire.experiments.network.lab import (
    NetlabConfig,
    check_lab,
    labels,
)
from gradwire.experiments.ranks.launchers import LAB_VARIABLE, lab_here


def test_labels_tell_of_labs_and_emulated_links(monkeypatch):
    assert (lab_here(), labels()) == (None, [])
    assert labels("100mbit") == ["emulated link 100 Mbit/s"]
    monkeypatch.setenv(LAB_VARIABLE, "4 hosts at 1gbit")
    assert (lab_here(), labels()) == ("4 hosts at 1gbit", ["netlab: 4 hosts at 1gbit"])


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ({}, "4 hosts without limits"),
        ({"down": "50mbit"}, "4 hosts at no limit up and 50 Mbit/s down"),
        ({"rate": "10mbit", "down": "10mbit"}, "4 hosts at 10 Mbit/s"),
        (
            {"rate": "110mbit", "down": "500mbit", "delay": "30ms", "jitter": "500us", "loss": "0.1%"},
            "4 hosts at 110 Mbit/s up and 500 Mbit/s down, delay 30 ms, jitter 0.5 ms, loss 0.1 %",
        ),
    ],
)
def test_settings_of_the_links_are_in_the_label(options, described):
    assert NetlabConfig(4, **options).described == described


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rate": "1gbit"}, "netlab.rate without"),
        ({"utilization": "use.json"}, "netlab.utilization without"),
        ({"rate": "1gbit", "utilization": "use.json"}, "netlab.rate and netlab.utilization without"),
    ],
)
def test_what_is_set_of_a_lab_without_hosts_is_refused(options, named):
    with pytest.raises(ValueError, match=f"^{named} hosts, .*: add --netlab.hosts 4, or leave it out$"):
        check_lab(NetlabConfig(**options))
    check_lab(NetlabConfig(hosts=2, **options))
    check_lab(NetlabConfig())
