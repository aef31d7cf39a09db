"""What other code reads and calls of torch's class, on a model of ours; conformance compares it with torch's own."""

import pytest
import torch
from torch import nn

import gradwire


@pytest.fixture
def model(group):
    made = gradwire.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    yield made
    made.compression.close()


def error_told(model):
    return model._get_ddp_logging_data().get("error")


def test_what_is_refused_after_construction_is_also_logged(model):
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 3)
    assert error_told(model) == "<class 'TypeError'>: Communication hook must be callable."
    with pytest.raises(ValueError, match=r"it is called as hook\(state, bucket\)"):
        model.register_comm_hook(None, lambda state, gradients: None)


def test_what_is_refused_while_there_is_no_log_yet_is_raised_all_the_same(group):
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        gradwire.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


def test_buffers_that_the_module_replaces_are_found_anew(model):
    fresh = torch.ones(2)
    model.module[1].running_mean = fresh
    model(torch.randn(3, 2)).sum().backward()
    assert any(each is fresh for each in model.modules_buffers)


def test_backward_cannot_be_ended_by_hand(model):
    assert not model.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match="let backward end by itself"):
        model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="let backward end by itself"):
        model.finalize_backward()
