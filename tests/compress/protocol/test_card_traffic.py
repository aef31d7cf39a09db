"""What the page on compressors says of the bytes that leave a host."""

import re
from pathlib import Path

import pytest
import torch

from gradwire.compress import Layout, Ranks, compressor
from gradwire.compress.protocol.card_traffic import card_bytes
from gradwire.compress.simulate import STEADY, requests_of

PAGE = Path(__file__).parents[3] / "docs" / "compressors.md"
RANKS = Ranks(8, per_host=2)
LAYOUT = Layout(("a", "b"), ((1024, 1024),) * 2, torch.float32, torch.device("meta"), RANKS)


def from_a_host(spec):
    return card_bytes(requests_of(compressor(spec), LAYOUT, STEADY), RANKS, rings=True)


@pytest.mark.parametrize("spec", ["int4", "topk", "powersgd:rank=4"])
def test_hosts_sends_as_many_times_fewer_bytes_through_a_card_as_the_page_says(spec):
    text = PAGE.read_text("utf-8").partition("network card of such a host")[2]
    shown = re.search(rf"([\d.]+)x (?:fewer bytes )?with `{spec.partition(':')[0]}`", text)
    assert f"{from_a_host(spec) / from_a_host(f'hosts+{spec}'):.1f}" == shown[1]
