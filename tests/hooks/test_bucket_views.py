"""Gradients that are copies of DDP's buckets cost their size once more: attach says so, where that is much."""

import logging
import logging.handlers

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire


def lines_of_attach(rank, world_size, width, ours, views):
    lines = logging.handlers.BufferingHandler(9)
    logging.getLogger("gradwire").addHandler(lines)
    kind = gradwire.DistributedDataParallel if ours else TorchDDP
    model = kind(nn.Linear(width, width, bias=False), gradient_as_bucket_view=views)
    handle = gradwire.attach(model, "bf16")
    logging.getLogger("gradwire").removeHandler(lines)
    handle.close()
    return [each.getMessage() for each in lines.buffer]


@pytest.mark.parametrize(
    ("width", "ours", "views", "expected"),
    [(1600, False, False, ["10 MB"]), (1500, False, False, []), (1600, False, True, []), (1600, True, True, [])],
)
def test_attach_says_on_the_first_rank_what_views_would_save(ranks, width, ours, views, expected):
    first, second = ranks.run(lines_of_attach, 2, width, ours, views)
    assert second == []
    assert len(first) == len(expected)
    assert all(
        each in line and "gradient_as_bucket_view=True" in line for each, line in zip(expected, first, strict=True)
    )
