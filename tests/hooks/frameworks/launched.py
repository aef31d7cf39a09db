"""Ranks of the session's pool as frameworks expect them: with what torchrun puts into the environment."""

import gc
import logging
import os
import sys
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

SPEC = "topk:ratio=0.05,error_feedback=1"  # whatever the optimizer
TIMEOUT = 110  # seconds: a framework takes its time to be imported
BATCH, STEPS = 4, 3  # rows of a rank's batch; steps before a checkpoint, and after it
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)  # of Lightning's trainer


compiled_too = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=str)


def needing(*packages):
    """A mark that skips where one is missing; it imports none, which takes seconds."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@contextmanager
def launched(rank, world_size):
    """An environment whose process group is there already; what frameworks say and leave behind ends with it."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    variables |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    variables |= {"TORCHELASTIC_RUN_ID": "pool", "HF_HUB_OFFLINE": 1, "ACCELERATE_USE_CPU": "true"}
    logging.disable(logging.WARNING)
    try:
        environment = mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()})
        with environment, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        if "accelerate.state" in sys.modules:
            forget_accelerate()
        gc.collect()
        gc.freeze()  # or each later collection of this process goes through all of a framework


def forget_accelerate():
    """Its state of the process, with a process group that ends."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


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
