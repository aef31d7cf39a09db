"""The page's script of two sites, as two processes at a rendezvous of this one."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwire.hooks.local_sgd.server import keep

from ...forked import Script

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "train_sites.py"


def models_of(address, *arguments):
    """What the script's sites end with."""
    variables = {name: value for name, value in os.environ.items() if name != "GRADWIRE_SECRET"}
    text = SCRIPT.read_text("utf-8")
    sites = [Script(text, address, site, *arguments, variables=variables) for site in range(2)]
    ended = [site.end() for site in sites]
    assert [each.code for each in ended] == [0, 0], ended
    said = [re.fullmatch(r"site (\d): 64 steps, 18 rounds of 2 sites, model (-?[\d.]+)\n", each.out) for each in ended]
    assert all(said), ended
    assert [each[1] for each in said] == ["0", "1"]
    return [each[2] for each in said]


def test_two_sites_end_with_one_model(town):
    first, second = models_of(town.address)
    assert first == second


def test_two_sites_behind_a_relay_with_the_secret_of_the_page_end_with_one_model(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    page = (SCRIPT.parents[1] / "two-sites.md").read_text("utf-8")
    made = re.search(r"^\$ (openssl .*)$", page, re.MULTILINE)[1]
    subprocess.run(made, shell=True, cwd=tmp_path, check=True, capture_output=True)
    server = keep(secret=tmp_path / "sites.pem", relay=True)
    first, second = models_of(f"127.0.0.1:{server.port}", tmp_path / "sites.pem")
    server.close()
    assert first == second
