"""How much Python of ours runs on a gradient's way: what is known when buckets are made is not looked up in the step."""

import sys
import threading
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

import gradwire

from ...torch_versions import copied_in_cpp

ROOT = str(Path(gradwire.__file__).parents[1])
LAYERS = tuple(f"{ROOT}/{layer}/" for layer in ("kernels", "compress", "ddp_core", "hooks"))
WARM_UP = 5  # steps; buckets are made anew after the first


class Calls:
    """The functions of ours that threads call inside the `with`, those of threads that this object is older than."""

    def __init__(self):
        self.names = []
        self._counts = False
        threading.setprofile(self._note)

    def __enter__(self):
        sys.setprofile(self._note)
        self._counts = True
        return self.names

    def __exit__(self, *_):
        self._counts = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame, event, _):
        if self._counts and event == "call" and frame.f_code.co_filename.startswith(LAYERS):
            self.names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


def calls_of_a_backward(rank, world_size, layers, **options):
    """The functions of ours that one backward calls on all threads, as file.function."""
    calls = Calls()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    model = gradwire.DistributedDataParallel(module, **options)
    inputs = torch.full((4, 32), rank + 1.0)
    for _ in range(WARM_UP):
        model.zero_grad()
        model(inputs).square().sum().backward()
    model.zero_grad()
    loss = model(inputs).square().sum()
    with calls as names:
        loss.backward()
    model.compression.close()
    return names


def on_the_way(names):
    """Of each bucket, the calls from when it is complete until it is on the wire."""
    starts = [place for place, name in enumerate(names) if name == "reducer._launch"]
    ways = [list(takewhile(lambda name: name != "host_memory.start", names[place:])) for place in starts]
    return [len(way) + 1 for way in ways]


@copied_in_cpp
def test_a_bucket_without_compression_is_on_the_wire_after_few_calls(ranks):
    for names in ranks.run(calls_of_a_backward, 2, 8, bucket_cap_mb=0.01):
        first, *others = on_the_way(names)
        assert len(others) > 1
        assert max(others) <= 15
        assert (
            first <= 15 + 5
        )  # it begins the step: the one before is judged, undone or kept once this one is sure to come


@copied_in_cpp
def test_a_backward_with_powersgd_takes_few_calls_on_all_threads_together(ranks):
    for names in ranks.run(calls_of_a_backward, 2, 4, compressor="powersgd:rank=1"):
        assert len(names) <= 250


def calls_of_steps(rank, world_size):
    """How many functions of ours a step calls, without overlap and with one that stays out of the way."""
    found = []
    for overlapped in (False, True):
        calls = Calls()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = gradwire.DistributedDataParallel(nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if overlapped:
            optimizer = gradwire.overlap(model, optimizer, order="synchronous")
        inputs = torch.full((4, 32), rank + 1.0)

        def step(model=model, optimizer=optimizer, inputs=inputs):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

        for _ in range(WARM_UP):
            step()
        with calls as names:
            step()
        model.compression.close()
        found.append(len(names))
    return found


def test_overlap_that_gains_nothing_takes_few_calls_of_a_step(ranks):
    for without, with_overlap in ranks.run(calls_of_steps, 2):
        assert with_overlap - without <= 14
