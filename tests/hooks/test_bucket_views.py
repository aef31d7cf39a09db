"""Gradients that are copies of DDP's buckets cost their size once more: attach says so, where that is much."""

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..ddp_core.errors import logged


def lines_of_attach(rank, world_size, width, ours, views):
    kind = gradwire.DistributedDataParallel if ours else TorchDDP
    with logged() as lines:
        model = kind(nn.Linear(width, width, bias=False), gradient_as_bucket_view=views)
        gradwire.attach(model, "bf16").close()
    return lines


@pytest.mark.parametrize(
    ("width", "ours", "views", "said"),
    [(1600, False, False, True), (1500, False, False, False), (1600, False, True, False), (1600, True, True, False)],
)
def test_attach_says_on_the_first_rank_what_views_would_save(ranks, width, ours, views, said):
    first, second = ranks.run(lines_of_attach, 2, width, ours, views)
    assert second == []
    assert len(first) == said
    assert all("10 MB" in line and "gradient_as_bucket_view=True" in line for line in first)
