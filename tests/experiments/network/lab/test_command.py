import re

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.network.lab.command import report_rate


@pytest.mark.parametrize(
    ("arguments", "told_of"),
    [
        ([], "--check"),
        (["--hosts=4", "--check", "--", "ls"], "or --check"),
        (["--", "ls"], "hosts is at least 1"),
        (["--hosts=100", "--", "ls"], "0 to 99"),
        (["--hosts=2", "--rate=fast", "--", "ls"], "such as 100mbit"),
        (["--hosts=1", "--rate=1gbit", "--check"], "two hosts and a rate"),
        (["--hosts=2", "--check"], "two hosts and a rate"),
        (["--hosts=2", "--", "no-such-command"], "no such command"),
        (["--hosts=2", "--utilization=/nowhere/file.json", "--", "ls"], "utilization: there is no folder /nowhere"),
        (["--hosts=2", "--utilization=.", "--", "ls"], "utilization: . is a folder; name a file"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, told_of, capsys):
    assert main(["netlab", *arguments]) == 2
    assert told_of in capsys.readouterr().err


@pytest.mark.slow
def test_the_check_measures_the_links_with_gloo(possible, capfd):
    code = main(["netlab", "--hosts=2", "--rate=20mbit", "--check"])
    shown = capfd.readouterr().out
    assert shown.startswith("2 hosts at 20 Mbit/s, Gloo's ring all-reduce")
    payload = float(re.search(r"^payload +([\d.]+)", shown, re.MULTILINE)[1])
    assert 10 < payload < 20  # a busy machine takes some of the rate; the verdict is to say so
    assert payload >= 18 if code == 0 else payload <= 18  # printed with one digit


def test_the_check_fails_where_the_payload_is_more_than_a_tenth_off(capsys):
    config = NetlabConfig(4, "100mbit")
    assert [report_rate(payload, 12.5e6, config) for payload in (11.9e6, 11.3e6, 11.2e6, 13.8e6)] == [0, 0, 1, 1]
    assert "95.2%" in capsys.readouterr().out
