"""Ranks of the session's pool as frameworks expect them: with what torchrun puts into the environment."""

import os
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

SPEC = "topk:ratio=0.05"
BATCH, STEPS = 4, 3  # rows of a rank's batch; steps before a checkpoint, and after it


@contextmanager
def launched(rank, world_size):
    """An environment whose process group is there already."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    variables |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    variables |= {"TORCHELASTIC_RUN_ID": "pool", "HF_HUB_OFFLINE": 1, "ACCELERATE_USE_CPU": "true"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))


def data(world_size):
    """Rows for as many steps as there are before a checkpoint."""
    generator = torch.Generator().manual_seed(1)
    rows = world_size * BATCH * STEPS
    return TensorDataset(torch.randn(rows, 64, generator=generator), torch.randn(rows, 8, generator=generator))


def numbers(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def dense_bytes():
    return 4 * sum(parameter.numel() for parameter in network().parameters())
