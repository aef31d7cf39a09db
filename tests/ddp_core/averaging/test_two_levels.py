"""Ranks that share a host are told what `hosts+` would save between hosts, where it saves anything."""

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import DistributedDataParallel
from gradwire.compress import Layout, Ranks, compressor
from gradwire.ddp_core.averaging.two_levels import without_levels

BUCKET = Layout(("w",), ((2560, 2560),), torch.float32, torch.device("cpu"), Ranks(16))  # 25 MiB


def told(spec, here, world=16):
    with mock.patch.object(dist, "get_world_size", return_value=world):
        return without_levels(compressor(spec), BUCKET, {"LOCAL_WORLD_SIZE": here})


def test_two_hosts_of_eight_are_told_of_fewer_bytes_through_the_network_card():
    """int4: 25 MiB / 8 and its scales, two rounds of 15/16 of it, 8/15 of them to ranks elsewhere, of 8 ranks."""
    payload = 25 / 8 * (1 + 4 / 64)  # MiB: a float16 scale of each block of 64 numbers, or less
    text = told("int4", "8")
    ratio = float(text.rsplit(" sends ", 1)[1].split("x ")[0])
    assert "hosts+int4" in text
    assert ratio == pytest.approx((2 * payload * 15 / 16) * 8 * 8 / 15 / (2 * payload * 1 / 2), rel=0.02)


@pytest.mark.parametrize(
    ("spec", "here", "world"),
    [("int4", "1", 16), ("int4", "16", 16), ("int4", "6", 16), ("int4", "8", 32), ("bf16", "8", 16),
     ("powersgd:rank=4", "8", 16), ("hosts:ranks=8+int4", "8", 16)],
)  # fmt: skip
def test_nothing_is_said_where_nothing_is_saved_or_hosts_are_not_known(spec, here, world):
    """One rank a host, one host, uneven hosts, a part of the world, sums, low rank in floats, and two levels."""
    assert told(spec, here, world) is None


def said(rank, world_size):
    """What the log says of two levels in two steps."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("gradwire.ddp_core.averaging.averager")
    logger.addHandler(handler)
    model = DistributedDataParallel(nn.Linear(64, 64), compressor="int4")
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            model.zero_grad()
    logger.removeHandler(handler)
    return [text for text in records if "hosts+int4" in text]


def test_rank_zero_says_it_once(ranks):
    first, *others = ranks.run(said, 4)
    assert len(first) == 1
    assert others == [[], [], []]
