"""How much Python of ours runs on a gradient's way: what is known when buckets are made is not looked up in the step."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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
        comprehension = frame.f_code.co_name.endswith(("comp>", "expr>"))
        if self._counts and event == "call" and not comprehension and frame.f_code.co_filename.startswith(LAYERS):
            self.names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")


TOLERANCE = 1.1  # a helper more is no fault
WAYS = {  # (whose DDP, compressor): about so many calls, in so many files, for a backward of three layers in two buckets
    ("ours", "none"): (71, 15),
    ("ours", "powersgd:rank=4"): (180, 21),
    ("torch's", "none"): (53, 12),
    ("torch's", "powersgd:rank=4"): (154, 20),
    ("FSDP2's", "int4"): (268, 23),
}


def way_of_a_gradient(rank, world_size, whose, spec):
    """Calls of functions of ours, and the files that they are in, from a gradient's hook until `.grad` has the average."""
    calls = Calls()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(256, width) for width in (256, 256, 8)))
    if whose == "ours":
        model = gradwire.DistributedDataParallel(module, compressor=spec, bucket_cap_mb=0.2)
        handle = model.compression
    elif whose == "FSDP2's":
        model, mesh = module, init_device_mesh("cpu", (world_size,))
        for part in (*module, module):
            fully_shard(part, mesh=mesh)
        handle = gradwire.attach(model, gather="int8", reduce=spec)
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=0.2)
        handle = gradwire.attach(model, spec)
    inputs = torch.full((4, 256), rank + 1.0)
    for _ in range(2 * WARM_UP):
        model.zero_grad()
        model(inputs).square().mean().backward()
    model.zero_grad()
    loss = model(inputs).square().mean()
    with calls as names:
        loss.backward()
    handle.close()
    return len(names), len({name.partition(".")[0] for name in names})


@copied_in_cpp
@pytest.mark.parametrize(("whose", "spec"), WAYS)
def test_the_way_of_a_gradient_gets_no_longer(ranks, whose, spec):
    most_calls, most_files = WAYS[whose, spec]
    for calls, files in ranks.run(way_of_a_gradient, 2, whose, spec):
        assert calls <= TOLERANCE * most_calls
        assert files <= TOLERANCE * most_files
