"""Flat numbers of steps, against numbers counted by hand."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn

from gradwire.compress.state.gauge import ELEMENTS, EVERY, Gauge
from gradwire.ddp_core.measure.stats import Measured, Stats, exposed, feedback, metrics
from gradwire.ddp_core.measure.step import BucketStats, Record, Step
from gradwire.kernels import Residual

from ..wrapping import wrapped

RANKS, ELEMENTS_SENT = 4, 1000


def hooked_step(began=10.0, per_host=1):
    """Two buckets under a hook: the link is held from 1 to 4 and from 5 to 6 seconds after the first one came."""
    records = [
        Record([("all", 500, 750.0)], [("encode", 0, 1), ("wait", 1, 3), ("decode", 3, 3.5)]),
        Record([("all", 100, 150.0), ("all", 60, 90.0)], [("wait", 2, 4), ("decode", 4, 5), ("wait", 5, 6)]),
    ]
    for record in records:
        record.spans[:] = [(kind, began + begin, began + end) for kind, begin, end in record.spans]
    programs = [
        BucketStats((f"p{n}",), ELEMENTS_SENT, record, None, 2, began + n, per_host) for n, record in enumerate(records)
    ]
    return Step(number=1, costs=programs, interval=20.0)


def measured(*steps, **options):
    stats = Stats(7, tuple(steps[-1].costs), Record())
    return Measured(steps, stats, 3, RANKS, **options)


def test_bytes_ratio_and_seconds_of_a_step_are_those_of_its_buckets():
    found = metrics(measured(hooked_step()))
    counts = {"steps": 7, "steps_here": 3, "rounds": 3, "payload_bytes": 660, "sent_bytes": 990}
    assert {name: found[name] for name in counts} == counts
    assert found["ratio"] == pytest.approx(2 * 3 / 4 * 2 * 2 * ELEMENTS_SENT / 990)
    assert (found["encode_seconds"], found["wait_seconds"], found["decode_seconds"]) == pytest.approx((1, 5, 1.5))
    assert found["exposed_seconds"] == pytest.approx(5)  # the last bucket came at 1, the last reply at 6
    assert found["compute_seconds"] == pytest.approx(15)
    assert found["link_bytes_per_second"] == pytest.approx(990 / 4)
    assert "cosine" not in found


def test_the_ratio_of_two_levels_is_over_shares_that_are_sent_uncompressed_between_hosts():
    step = hooked_step(per_host=2)
    step.costs[0].record.requests[:] = [("host", 800, 400.0), ("across", 400, 100.0), ("host", 800, 400.0)]
    step.costs[1].record.requests[:] = [("across", 400, 50.0)]
    found = metrics(measured(step))
    share, hosts = 2 * ELEMENTS_SENT / 2, 2
    assert found["ratio"] == pytest.approx(2 * 2 * share * (hosts - 1) / hosts / 150)


def test_traffic_inside_hosts_alone_stands_for_no_bytes_between_them():
    step = hooked_step(per_host=2)
    step.costs[0].record.requests[:] = [("host", 800, 400.0)]
    alone = hooked_step()
    del alone.costs[0]
    assert metrics(measured(step))["ratio"] == metrics(measured(alone))["ratio"]


def test_a_mean_is_over_the_last_steps_that_know_a_number():
    first, second = hooked_step(), hooked_step(100.0)
    first.interval, second.costs = 0.0, second.costs[:1]
    found = metrics(measured(first, second), most=8)
    assert found["sent_bytes"] == (990 + 750) / 2
    assert found["step_seconds"] == 20.0
    assert metrics(measured(first, second))["sent_bytes"] == 750


def test_a_mean_is_of_steps_with_one_compressor():
    steps = [replace(hooked_step(), setup=setup) for setup in ("int8", "int8", "none", "int8")]
    steps[0].costs, steps[2].costs = steps[0].costs[:1], []
    assert metrics(measured(*steps), most=8)["sent_bytes"] == (750 + 990 + 990) / 3
    assert metrics(measured(*steps[:3]), most=8)["sent_bytes"] == 0
    of_int8 = metrics(measured(*steps[:3], on_host=False), most=8, seen=steps[1])  # reported late, by a GPU's clock
    assert of_int8["sent_bytes"] == (750 + 990) / 2


def test_on_a_gpu_only_whole_steps_are_timed():
    found = metrics(measured(hooked_step(), on_host=False))
    assert {name for name in found if "second" in name} == {"step_seconds"}


def test_our_own_ddp_tells_what_was_exposed_without_the_launch_of_the_last_bucket():
    step = Step(ready={0: 1.0, 1: 2.0}, last_launch=2.5, computed=2.75, ended=4.0)
    assert exposed(step) == pytest.approx(4.0 - 2.25)


def gauge(gradient, before, after):
    found, residual = Gauge(), Residual(before, after)
    for _ in range(EVERY):
        found.begin(gradient, residual)
        found.end(residual)
    return found


def test_norms_and_cosine_of_small_buckets_are_those_of_all_elements_together():
    generator = torch.Generator().manual_seed(3)
    sizes = (50, 2 * ELEMENTS - 1)
    buckets = [[torch.randn(size, generator=generator) * scale for scale in (2.0, 1.0, 0.5)] for size in sizes]
    programs = [BucketStats(("p",), len(each[0]), Record(), gauge(*each)) for each in buckets]
    gradient, before, after = (torch.cat(each).double() for each in zip(*buckets, strict=True))
    sent = gradient + before - after
    found = feedback(programs)
    assert found["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert found["residual_norm"] == pytest.approx(after.norm().item(), rel=1e-5)
    assert found["residual_ratio"] == pytest.approx((after.norm() / gradient.norm()).item(), rel=1e-5)
    cosine = torch.cosine_similarity(gradient + before, sent, dim=0)
    assert found["cosine"] == pytest.approx(cosine.item(), rel=1e-5)


def test_norms_of_large_buckets_are_estimates_for_all_of_their_elements():
    generator = torch.Generator().manual_seed(4)
    gradient = torch.randn(100 * ELEMENTS, generator=generator)
    programs = [BucketStats(("p",), len(gradient), Record(), gauge(gradient, gradient * 0, gradient * 0.5))]
    found = feedback(programs)
    assert found["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=0.05)
    assert found["residual_ratio"] == pytest.approx(0.5)


def trained(rank, world_size, own):
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 8, bias=False))
    ddp, handle = wrapped(own, model, "bf16", {"timeout": timedelta(seconds=20)})
    before = handle.metrics(), repr(handle)
    for step in range(3):
        ddp(torch.ones(2, 32) * (rank + step)).sum().backward()
    state = handle.state_dict()
    handle.load_state_dict(state)
    ddp(torch.ones(2, 32)).sum().backward()
    found, text = handle.metrics(), repr(handle)
    handle.close()
    assert "bf16, closed, rank" in repr(handle)
    return before, found, text


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_a_handle_tells_the_bytes_of_its_ranks_and_its_steps(own, ranks):
    parameters = 32 * 16 + 16 * 8
    for rank, (before, found, text) in enumerate(ranks.run(trained, 2, own)):
        assert before[0] == {"steps": 0, "steps_here": 0, "ranks": 2, "total_sent_bytes": 0.0}
        assert before[1] == f"<Handle: bf16, rank {rank} of 2, 0 steps, 0 of them here>"
        assert found["sent_bytes"] == found["payload_bytes"] == 2 * parameters
        assert found["ratio"] == pytest.approx(2.0)
        assert found["total_sent_bytes"] == 4 * 2 * parameters
        assert text == f"<Handle: bf16, rank {rank} of 2, 4 steps, 4 of them here, 2.0x fewer bytes in the last>"
        timed = {"step_seconds", "exposed_seconds", "compute_seconds", "encode_seconds", "wait_seconds"}
        assert timed < found.keys()
        assert all(isinstance(value, int | float) for value in found.values())
