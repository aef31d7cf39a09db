"""Replies that come late change nothing: every reader waits for them. `LateReplies` runs on a GPU, too (tests/gpu)."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import compressors
from gradwire.ddp_core.transport.protocol import Decorated

from ...hooks.given import Given, average, gradients
from ...late import Late, OnThread

SHAPES = ((16, 20), (9,), (12, 30), (4, 4), (16, 20))
STEPS = 3
LIMIT = timedelta(seconds=30)
EVERY = [name for name in compressors() if name != "dgc"]  # which takes no parameters that may be unused
SPECS = [*EVERY, "fp16+powersgd:rank=1", "powersgd:rank=2,power_iterations=2", "chunktopk:chunk=16"]
DTYPES = [torch.float32, torch.bfloat16]


class Hasty(Decorated):
    """A transport of somebody who does not wait."""

    def start(self, request, channel):
        """Say that a reply is there which is not."""
        pending = self.inner.start(request, channel)
        if isinstance(pending, OnThread):
            pending.there.wait = lambda _: True
            pending.reply = request.tensor.fill_(torch.nan)
        return pending


def averages(rank, device, spec, dtype, own, group, transport=None):
    """Of each step, on the CPU."""
    model = Given(SHAPES, dtype).to(device)
    settings = {"bucket_cap_mb": 0.001, "process_group": group, "find_unused_parameters": True}
    if own:
        ddp = gradwire.DistributedDataParallel(model, compressor=spec, transport=transport, **settings)
        handle = ddp.compression
    else:
        ddp = torch.nn.parallel.DistributedDataParallel(model, **settings)
        handle = gradwire.attach(ddp, spec, transport=transport)
    found = []
    for step in range(STEPS):
        given = [each.to(device) for each in gradients(rank, step, SHAPES, dtype)]
        found.append({name: each.cpu() for name, each in average(ddp, given).items()})
    assert len(handle.stats().buckets) > 1
    handle.close()
    return found


def in_time_and_late(rank, world_size, device, specs, dtype, own, backend):
    """{specification: the averages with and without delay}."""
    if device == "cuda":
        torch.cuda.set_device(0)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group([rank], backend=backend)
    run = partial(averages, rank, device, dtype=dtype, own=own, group=group)
    return {spec: (run(spec), run(spec, transport=lambda inner: Late(inner, LIMIT))) for spec in specs}


class LateReplies:
    """`device` and `backend`: of the process group; `world_size` ranks."""

    device, backend, world_size = "cpu", "gloo", 2

    @pytest.mark.parametrize(
        ("own", "dtype"),
        [
            pytest.param(own, dtype, marks=() if own == (dtype == torch.float32) else pytest.mark.thorough)
            for own in (False, True)
            for dtype in DTYPES
        ],
        ids=str,
    )
    def test_late_replies_change_no_bit(self, ranks, own, dtype):
        settings = (self.device, SPECS, dtype, own, self.backend)
        for found in ranks.run(in_time_and_late, self.world_size, *settings, timeout=100):
            for spec, (in_time, late) in found.items():
                for expected, step in zip(in_time, late, strict=True):
                    for name, numbers in step.items():
                        assert torch.equal(numbers, expected[name]), (spec, name)


class TestLateReplies(LateReplies):
    """On the CPU, by threads."""


def hasty(rank, world_size):
    return averages(rank, "cpu", "bf16", torch.float32, True, None, lambda inner: Hasty(Late(inner, LIMIT)))


def test_who_does_not_wait_gets_nan(ranks):
    for found in ranks.run(hasty, 2):
        assert any(numbers.isnan().any() for step in found for numbers in step.values())
