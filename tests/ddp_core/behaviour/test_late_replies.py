"""Replies that come late change nothing: every reader waits for them. `LateReplies` runs on a GPU, too (tests/gpu)."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import compressors
from gradwire.ddp_core.transport.protocol import Decorated

from ...hooks.given import Given, average, gradients
from ...late import Late, OnThread
from ..overlap.overlapped import Layers, Setting, equal
from ..wrapping import wrapped

SHAPES = ((16, 20), (9,), (12, 30), (4, 4), (16, 20))
STEPS = 3
LIMIT = timedelta(seconds=30)
SPECS = [*compressors(), "fp16+powersgd:rank=1", "powersgd:rank=2,power_iterations=2", "chunktopk:chunk=16"]
FEW = ["none", "int8", "topk:ratio=0.1", "powersgd:rank=2"]


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
    settings = {"bucket_cap_mb": 0.001, "process_group": group, "find_unused_parameters": spec != "dgc"}
    ddp, handle = wrapped(own, model, spec, {"transport": transport}, **settings)
    found = []
    for step in range(STEPS):
        given = [each.to(device) for each in gradients(rank, step, SHAPES, dtype)]
        found.append({name: each.cpu() for name, each in average(ddp, given).items()})
    assert len(handle.stats().buckets) > 1
    handle.close()
    return found


def group_of(rank, device, backend):
    """The ranks, on the first device."""
    if device == "cuda":
        torch.cuda.set_device(0)
    return dist.group.WORLD if backend == "gloo" else dist.new_group([rank], backend=backend)


def in_time_and_late(rank, world_size, device, backend, specs, dtype, own):
    """{specification: the averages with and without delay}."""
    run = partial(averages, rank, device, dtype=dtype, own=own, group=group_of(rank, device, backend))
    return {spec: (run(spec), run(spec, transport=late)) for spec in specs}


def late(inner):
    return Late(inner, LIMIT)


def overlapped_in_time_and_late(rank, world_size, device, backend, specs):
    """{specification: whether late replies change nothing of a training whose updates overlap with the next forward}."""
    group, same = group_of(rank, device, backend), {}
    settings = {"net": Layers, "device": device, "process_group": group, "slice_mb": 0.001}
    for spec in specs:
        ends = []
        for link in (None, late):
            setting = Setting(rank, "priority", compressor=spec, link=link, **settings)
            for _ in range(STEPS):
                setting.step()
                assert setting.pending
            ends.append(setting.end())
        same[spec] = equal(*ends)
    return same


class LateReplies:
    """`device` and `backend`: of the process group; `world_size` ranks; `limit`: seconds for all methods."""

    device, backend, world_size, limit = "cpu", "gloo", 2, 100

    @pytest.mark.parametrize(
        ("own", "dtype", "specs"),
        [
            (False, torch.bfloat16, FEW),
            pytest.param(True, torch.float32, SPECS, marks=pytest.mark.slow),
            pytest.param(False, torch.bfloat16, SPECS, marks=pytest.mark.thorough),
        ],
        ids=lambda each: f"{len(each)} compressors" if isinstance(each, list) else str(each),
    )
    def test_late_replies_change_no_bit(self, ranks, own, dtype, specs):
        settings = (self.device, self.backend, specs, dtype, own)
        for found in ranks.run(in_time_and_late, self.world_size, *settings, timeout=self.limit):
            assert_the_same(found)

    @pytest.mark.parametrize("specs", [FEW, pytest.param(SPECS, marks=pytest.mark.thorough)], ids=["few", "all"])
    def test_late_replies_change_no_bit_where_updates_overlap_with_the_next_forward(self, ranks, specs):
        settings = (self.device, self.backend, specs)
        for same in ranks.run(overlapped_in_time_and_late, self.world_size, *settings, timeout=self.limit):
            assert same == dict.fromkeys(specs, True)


class LateRepliesOnHosts:
    """Two hosts of two ranks: what is late is asked of the host, of the other hosts, or of all."""

    device, limit = "cpu", 100

    @pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True], ids=str)
    def test_late_replies_change_no_bit_on_two_levels(self, ranks, own):
        specs = ["hosts:ranks=2+int8", "hosts:ranks=2+powersgd:rank=2"]
        settings = (self.device, "gloo", specs, torch.float32, own)
        for found in ranks.run(in_time_and_late, 4, *settings, timeout=self.limit):
            assert_the_same(found)


def assert_the_same(found):
    for spec, (in_time, late) in found.items():
        assert equal(in_time, late), spec


class TestLateReplies(LateReplies):
    """On the CPU, by threads."""


class TestLateRepliesOnHosts(LateRepliesOnHosts):
    """On the CPU, by threads."""


def hasty(rank, world_size):
    return averages(rank, "cpu", "bf16", torch.float32, True, None, lambda inner: Hasty(late(inner)))


def test_who_does_not_wait_gets_nan(ranks):
    for found in ranks.run(hasty, 2):
        assert any(numbers.isnan().any() for step in found for numbers in step.values())
