"""When kernels are compiled, with stand-ins for what runs on a device."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import Layout, compressor
from gradwire.ddp_core.averaging import same_kernels

LAYOUT = Layout(("weight",), ((4, 4),), torch.float32, torch.device("cuda", 0))


@pytest.fixture
def steps(monkeypatch):
    """The steps that are rehearsed."""
    seen = []
    monkeypatch.setattr(same_kernels, "_compiled", set())
    monkeypatch.setattr(same_kernels, "rehearse", lambda compressor, layout, step, method=None: seen.append(step))
    monkeypatch.setattr(same_kernels, "all_finite", lambda tensor: None)
    stand_in = SimpleNamespace(zeros=lambda *_, **__: None, autocast=lambda *_, **__: nullcontext())
    monkeypatch.setattr(same_kernels, "torch", stand_in)
    return seen


def test_every_stage_is_run_once_for_each_device_and_dtype(steps):
    built = compressor("powersgd:rank=2,start_iter=5")
    for layout in (LAYOUT, dataclasses.replace(LAYOUT, names=("other",)), LAYOUT):
        same_kernels.compile_kernels(built, layout)
    assert sorted(steps) == [0, 0, 1, 1, 5, 5, 6, 6]  # as it is, and as a large one
    same_kernels.compile_kernels(built, dataclasses.replace(LAYOUT, dtype=torch.bfloat16))
    same_kernels.compile_kernels(built, dataclasses.replace(LAYOUT, device=torch.device("cuda", 1)))
    assert len(steps) == 24


def test_large_parameters_have_few_rows_and_small_buckets_are_tried_as_large_ones(steps, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        same_kernels, "rehearse", lambda compressor, layout, step, method=None: shapes.append(layout.shapes)
    )
    large = dataclasses.replace(LAYOUT, names=("embedding", "bias", "scalar"), shapes=((1 << 20, 2048), (32,), ()))
    same_kernels.compile_kernels(compressor("topk"), large)
    same_kernels.compile_kernels(compressor("bf16"), LAYOUT)
    assert shapes[::2] == [((1024, 2048), (32,), ()), ((4, 4),), ((1 << 18, 4),)]


def test_nothing_is_run_where_nothing_is_compiled(steps):
    same_kernels.compile_kernels(compressor("topk"), dataclasses.replace(LAYOUT, device=torch.device("cpu")))
    assert steps == []
