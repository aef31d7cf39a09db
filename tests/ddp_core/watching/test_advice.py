"""A training whose arithmetic costs more than it saves is told so, and one that a slow link holds up is not.

Both sleep for what they emulate, arithmetic or a link, far longer than a busy machine makes anything else last.
"""

import io
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.compress import ErrorFeedback, Gathered, TopK
from gradwire.ddp_core import Link, Paced
from gradwire.ddp_core.watching.advice import Adviser

STEPS = 9  # a report of each but the last
SECONDS = 0.1  # of a bucket's arithmetic; there are two in a step


@dataclass(frozen=True)
class SlowTopK(TopK):
    """The largest elements, found slowly."""

    def encode(self, *arguments, **named):
        time.sleep(SECONDS)
        super().encode(*arguments, **named)


def trained(rank, world_size, codec, rate):
    """What is told of a training whose link carries `rate` bytes a second: its lines, and the numbers of each report."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))  # 133 kB and 16 kB
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    method = ErrorFeedback(Gathered(codec))
    handle = gradwire.attach(ddp, method, transport=lambda inner: Paced(inner, Link(rate)))
    text, reports = io.StringIO(), []
    handle.watch(1, Console(file=text))
    handle.watch(1, lambda told, step: reports.append(dict(told)))
    for _ in range(STEPS):
        ddp(torch.randn(4, 64)).square().mean().backward()
    handle.close()
    return text.getvalue(), reports


def test_a_training_is_told_that_dense_steps_would_be_faster_where_its_arithmetic_costs_more_than_the_link(ranks):
    (text, reports), (elsewhere, _) = ranks.run(trained, 2, SlowTopK(ratio=0.25), 4e6)  # dense: 37 ms, against 200
    assert text.count("an uncompressed step would be faster now: about") == 1
    assert reports[-1]["dense_step_seconds"] < reports[-1]["step_seconds"]
    assert elsewhere == ""


def test_a_training_on_a_slow_link_is_not_told_so(ranks):
    (text, reports), _ = ranks.run(trained, 2, TopK(ratio=0.01), 1e4)  # dense: 14 s, against 300 ms
    assert text.count("step ") == STEPS - 1
    assert "uncompressed step" not in text
    assert reports[-1]["dense_step_seconds"] > 2 * min(
        each["step_seconds"] for each in reports if "step_seconds" in each
    )


def told(ratios, first=200, what="powersgd"):
    """What an adviser says of reports with these residuals, in units of the gradient."""
    adviser = Adviser()
    return [
        adviser.advice(what, {"steps": step, "step_seconds": 0.1, "residual_ratio": ratio})
        for step, ratio in enumerate(ratios, first)
    ]


def test_a_residual_that_stays_large_is_told_once_with_its_size_and_what_to_do():
    *before, said, after = told([0.5, 1.2, 1.3, 1.4, 1.5])
    assert before == [None] * 3
    assert after is None
    for part in ("powersgd is 1.4x the gradient", "validation loss", "rank", "bits"):
        assert part in said


def test_large_residuals_of_other_compressors_and_what_is_no_number_are_not_told():
    assert not any([*told([1.2] * 6, what="topk"), *told([float("nan")] * 6)])


def test_a_residual_that_is_small_or_large_now_and_then_or_in_the_first_steps_alone_is_not_told():
    assert not any([*told([0.4] * 6), *told([1.2, 1.2, 0.4] * 3), *told([1.2] * 6, first=100)])
