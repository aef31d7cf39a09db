"""Slices told without a training, against those of a model in training."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import Ranks
from gradwire.experiments.advice.slice_sizes import gradient_mb, parts_of
from gradwire.experiments.bucket_plan import bucket_layouts

SPECS = {"int8": 6, "topk:ratio=0.05": 6, "powersgd:rank=1": 2}  # of 8 MiB of gradient, in slices of 2 MiB at most


def in_training(rank, world_size, spec):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    ddp_model = gradwire.DistributedDataParallel(model, compressor=spec)
    gradwire.overlap(ddp_model, torch.optim.SGD(ddp_model.parameters()))
    return [piece.buffer().numel() for piece in ddp_model.reducer.assignment.sending]


def told(spec, world_size):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    ready = dict(reversed(list(model.named_parameters())))
    cut_mb = gradient_mb(spec, Ranks(world_size), ready.values())
    return [parts_of(spec, layout, cut_mb) for layout in bucket_layouts(ready, cut_mb, Ranks(world_size))]


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_slices_are_told_as_there_are(ranks, spec):
    for sizes in ranks.run(in_training, 2, spec):
        assert len(sizes) == sum(told(spec, 2)) == SPECS[spec]
