"""Flags that the host asks for later, and steps that a CUDA graph must not hold."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import Layout, compressor
from gradwire.ddp_core.memory.bucket_memory import BucketMemory, DeviceFlag


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_tells_what_the_tensor_held(value):
    assert bool(DeviceFlag(torch.tensor(value))) is value


def test_a_flag_that_a_step_asks_for_while_it_is_captured_says_what_can_be_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    flag = DeviceFlag(torch.tensor(True))
    flag._arrived = SimpleNamespace(synchronize=lambda: None)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        bool(flag)


def test_what_counts_its_steps_is_not_captured_where_each_replay_would_draw_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layout = Layout(("p",), ((512,),), torch.float32, torch.device("cuda"))
    memory = BucketMemory(compressor("randomk:error_feedback=false"), layout, 1)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        next(memory.reduce(torch.ones(512), 1, watched=False))
