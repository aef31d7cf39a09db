"""What a bucket does in every step: how its programs end together."""

from datetime import timedelta

import pytest
import torch

from gradwire.ddp_core.averaging.plans import AllPending, all_done
from gradwire.ddp_core.engine.lanes import FuturePending


def futures(count):
    return [torch.futures.Future() for _ in range(count)]


def test_all_parts_of_a_bucket_are_waited_for_and_the_error_of_any_is_theirs():
    buffer, limit = torch.zeros(3), timedelta(seconds=5)
    good, bad = futures(2)
    whole = all_done([FuturePending(good), FuturePending(bad)], buffer)
    good.set_result(torch.ones(1))
    assert not whole.future.done()
    bad.set_exception(ArithmeticError("on purpose"))
    for pending in (whole, AllPending([FuturePending(good), FuturePending(bad)])):
        with pytest.raises((ArithmeticError, RuntimeError), match="on purpose"):
            pending.wait(limit)
    both = futures(2)
    whole = all_done(list(map(FuturePending, both)), buffer)
    for future in both:
        future.set_result(buffer)
    assert whole.wait(limit) is buffer
