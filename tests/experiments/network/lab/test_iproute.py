import os
import sys

import pytest

from gradwire.experiments.network.lab import (
    iproute,
)
from gradwire.experiments.network.lab.iproute import NetlabError

REFUSALS = {
    "platform": (lambda patch: patch.setattr(sys, "platform", "darwin"), "only Linux has"),
    "tools": (lambda patch: patch.setattr(iproute.shutil, "which", lambda tool: None), "install iproute2"),
    "root": (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "sudo -E"),
}


@pytest.mark.parametrize("missing", REFUSALS)
def test_a_machine_that_can_have_no_lab_is_told_what_to_do_instead(missing, monkeypatch, capsys):
    change, reason = REFUSALS[missing]
    with monkeypatch.context() as patch:
        if missing != "platform":
            patch.setattr(sys, "platform", "linux")
        if missing == "root":
            patch.setattr(iproute.shutil, "which", lambda tool: f"/sbin/{tool}")
        change(patch)
        with pytest.raises(NetlabError, match=reason) as refused:
            iproute.require()
    assert "--link 100mbit" in str(refused.value)


def test_what_iproute2_refuses_is_told_with_its_words(possible):
    with pytest.raises(NetlabError, match=r"ip link show nothing.*does not exist.*NET_ADMIN.*--link 100mbit"):
        iproute.run("ip", "link", "show", "nothing")
