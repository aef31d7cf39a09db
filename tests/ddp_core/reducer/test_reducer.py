"""The reducer under the threads that autograd has for several devices."""

import sys
import threading
import time
from datetime import timedelta

import torch
from torch import nn

from gradwire.ddp_core.buckets.assignment import BucketAssignment
from gradwire.ddp_core.engine.lanes import FuturePending
from gradwire.ddp_core.reducer.reducer import Reducer
from gradwire.ddp_core.reducer.unused_parameters import Rules

COUNT = 60


def launched_by_two_threads():
    """The order in which buckets were sent and how often steps ended, when two devices' gradients come at once."""
    cpu, meta = ([nn.Parameter(torch.zeros(2, device=device)) for _ in range(COUNT)] for device in ("cpu", "meta"))
    parameters = [parameter for pair in zip(cpu, meta, strict=True) for parameter in pair]
    sent = []

    class Averager:
        scale, zero_unused_gradients = 1.0, False

        def begin_step(self, step):
            step.number += 1

        def average(self, bucket):
            time.sleep(1e-4)  # lets the other thread run
            sent.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return FuturePending(future)

        def end_step(self):
            pass

    names = [str(index) for index in range(2 * COUNT)]
    assignment = BucketAssignment(parameters, [False] * 2 * COUNT, [16], alias=False)
    reducer = Reducer(parameters, names, assignment, Rules([16]), None, Averager(), timedelta(seconds=20))
    reducer.expect_backward()
    losses = [torch.stack([parameter.sum() for parameter in each]).sum() for each in (cpu, meta)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = [parameter.grad is not None for parameter in parameters]
    reducer.hooks.detach()
    return sent, reducer.finished, len(reducer.assignment.buckets), all(gradients)


def test_each_bucket_is_sent_once_and_in_order_whichever_thread_brings_its_last_gradient():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        answers = [launched_by_two_threads() for _ in range(10)]
    finally:
        sys.setswitchinterval(interval)
    for sent, finished, count, complete in answers:
        assert sent == list(range(count))
        assert finished == 1
        assert complete
