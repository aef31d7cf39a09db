import pytest

from gradwire.experiments.network.lab import NetlabConfig, check_lab


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
