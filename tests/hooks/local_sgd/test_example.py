"""The page's script of two sites, and lines to paste, as two processes at a rendezvous of this one."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwire.hooks.internet.server import Server

from ...forked import Script
from ...test_docs import PAGES

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "train_sites.py"


def ended_at(text, address, *arguments, folder="."):
    """The outputs of two sites that run a script with the same arguments."""
    variables = {name: value for name, value in os.environ.items() if name != "GRADWIRE_SECRET"}
    sites = [Script(text, address, site, *arguments, folder=folder, variables=variables) for site in range(2)]
    ended = [site.end() for site in sites]
    assert [each.code for each in ended] == [0, 0], ended
    return [each.out for each in ended]


def models_of(address, *arguments):
    """What the script's sites end with."""
    ended = ended_at(SCRIPT.read_text("utf-8"), address, *arguments)
    said = [re.fullmatch(r"site (\d): 64 steps, 18 rounds of 2 sites, model (-?[\d.]+)\n", each) for each in ended]
    assert all(said), ended
    assert [each[1] for each in said] == ["0", "1"]
    return [each[2] for each in said]


def certificate(folder):
    """The file that the page's command makes."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = re.search(r"^\$ (openssl .*)$", PAGES["docs/local-steps.md"], re.MULTILINE)[1]
    subprocess.run(made, shell=True, cwd=folder, check=True, capture_output=True)
    return folder / "sites.pem"


def test_two_sites_end_with_one_model(town):
    first, second = models_of(town.address)
    assert first == second


def test_two_sites_behind_a_relay_with_the_secret_of_the_page_end_with_one_model(tmp_path):
    secret = certificate(tmp_path)
    server = Server(secret=secret, relay=True)
    first, second = models_of(f"127.0.0.1:{server.port}", secret)
    server.close()
    assert first == second


MINE = """
import pathlib, sys
import torch
import gradwire
from torch.distributed.fsdp import fully_shard
address, site, ROUNDS = sys.argv[1], sys.argv[2], 5
gradwire.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
"""
LOOP = """
while local.round < ROUNDS:
    ...  # your step
local.finish()
"""


@pytest.mark.parametrize("page", ["local-steps", "local-steps-explained"])
def test_lines_to_paste_train_two_sites(page, tmp_path):
    (block,) = re.findall(r"^```py\n(.*?)^```$", PAGES[f"docs/{page}.md"], re.MULTILINE | re.DOTALL)
    secret = certificate(tmp_path) if "sites.pem" in block else ""
    server = Server(secret=secret, relay=bool(secret))
    text = MINE + block.replace('"203.0.113.1:29400"', "address") + LOOP * ("while" not in block)
    text = text.replace("...  # your step", "step()") + "print(local.round)"
    first, second = ended_at(text, f"127.0.0.1:{server.port}", folder=tmp_path)
    server.close()
    assert first == second
