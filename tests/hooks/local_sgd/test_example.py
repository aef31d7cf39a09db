"""The page's script of two sites, as two processes at a rendezvous of this one."""

import os
import re
from pathlib import Path

from ...forked import Script

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "train_sites.py"


def test_two_sites_end_with_one_model(town):
    variables = {name: value for name, value in os.environ.items() if name != "GRADWIRE_SECRET"}
    sites = [Script(SCRIPT.read_text("utf-8"), town.address, site, variables=variables) for site in range(2)]
    ended = [site.end() for site in sites]
    assert [each.code for each in ended] == [0, 0], ended
    said = [re.fullmatch(r"site (\d): 64 steps, 18 rounds of 2 sites, model (-?[\d.]+)\n", each.out) for each in ended]
    assert all(said), ended
    assert [each[1] for each in said] == ["0", "1"]
    assert said[0][2] == said[1][2]
