"""Where steps of torch's DDP begin and end, as its communication hook finds out."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradwire.hooks.torch_steps import ByForward


class Noted(list):
    """The ends of steps, beside what a test notes."""

    def all_sent(self):
        self.append("end")


def layer(noted, detector, index):
    """A function whose backward brings a bucket."""
    parameter = torch.nn.Parameter(torch.ones(3))
    bucket = SimpleNamespace(index=lambda: index, parameters=lambda: [parameter])

    def comes(_):
        begins = detector.begins(bucket)
        noted.append("begin" if begins else "bucket")
        if begins:
            detector.begun(noted)

    def function(numbers):
        numbers = numbers * 2
        if numbers.requires_grad:  # not in the forward of a checkpoint
            numbers.register_hook(comes)
        return numbers

    return function


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("watched", [True, False])
def test_a_step_that_begins_in_a_reentrant_checkpoint_ends_with_the_backward_around_it(watched, copied):
    noted, detector = Noted(), ByForward()
    detector = pickle.loads(pickle.dumps(detector)) if copied else detector
    first, last = (layer(noted, detector, index) for index in (1, 0))
    for _ in range(2):
        detector.announce()
        inside = first(torch.ones(3, requires_grad=True))
        outputs = checkpoint(last, inside, use_reentrant=True) if watched else last(inside)
        if watched:
            detector.watch(None, None, {"outputs": outputs})
        outputs.sum().backward()
    assert noted == ["begin", "bucket", "end"] * 2


def test_a_backward_without_buckets_ends_no_step():
    noted, detector = Noted(), ByForward()
    outputs = torch.ones(3, requires_grad=True) * 2
    detector.watch(None, None, outputs)
    outputs.sum().backward()
    assert noted == []
