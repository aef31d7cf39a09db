"""The wrappers that gradwire has a handle for, as one table: the laws of this folder hold of each.

A new wrapper is one entry more. A law trains by `Training`, whose gradients are given, so that it knows what is owed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

from ...torch_versions import fsdp_of_others, replicate_of_fsdp
from ..fsdp.given import SHAPES, GivenParts, gradients
from ..given import compressed, same
from ..replicate.given import replicate

SMALL = {"bucket_cap_mb": 0.0005}  # several buckets
ZEROS = [[torch.zeros(shape) for shape in part] for part in SHAPES]


def in_ddp(kind, model, spec, options, **of_ddp):
    return compressed(kind, model, spec, {**SMALL, **of_ddp}, **options)


attached, hooked, own = (partial(in_ddp, kind) for kind in ("attached", "hooked", "own"))


def by_parts(wrap, model, *sizes):
    """Each part of the model, and the rest, on a mesh of the ranks."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for part in (*model.parts, model):
        wrap(part, mesh=mesh)
    return model


def replicated(model, spec, options):
    model = by_parts(replicate, model, dist.get_world_size())
    return model, gradwire.attach(model, spec, **options)


def sharded(model, spec, options):
    model = by_parts(fully_shard, model, dist.get_world_size())
    return model, gradwire.attach(model, **{"gather": "int8", "reduce": spec, **options})


def hybrid(model, spec, options, averaged="replicas"):
    """Two shards of the model, or three where ranks are odd."""
    world_size = dist.get_world_size()
    shards = 3 if world_size % 2 else 2
    model = by_parts(fully_shard, model, world_size // shards, shards)
    return model, gradwire.attach(model, **{averaged: spec, **options})


def compressed_hybrid(model, spec, options, reduce="int4"):
    return hybrid(model, spec, {"reduce": reduce, **options})


def replicas_alone(model, spec, options):
    """Each rank has the model as a whole, and FSDP2 averages over replicas alone."""
    model = by_parts(fully_shard, model, dist.get_world_size(), 1)
    return model, gradwire.attach(model, replicas=spec, **options)


@dataclass(frozen=True)
class Wrapper:
    """What wraps a model, and gives the handle; `specs` hold gradients back, each in a state of another kind."""

    made: Callable[[nn.Module, str, dict[str, Any]], tuple[nn.Module, Any]]
    specs: Sequence[str]
    world_size: int = 2
    marks: Sequence[Any] = ()


NEWER = (fsdp_of_others,)
SLOW = pytest.mark.slow  # four ranks, for what two ranks of "FSDP2" or "replicas" show of most laws
WRAPPERS = {
    "attach": Wrapper(attached, ("topk:ratio=0.05", "powersgd:rank=1", "int4:start_iter=2,warmup=int8", "int4:core=1")),
    "comm_hook": Wrapper(hooked, ("int8:error_feedback=1", "onebit:error_feedback=1")),
    "own": Wrapper(own, ("onebit:error_feedback=1", "batched-powersgd")),
    "replicate": Wrapper(replicated, ("powersgd:rank=1,start_iter=1", "topk:ratio=0.1"), marks=(replicate_of_fsdp,)),
    "FSDP2": Wrapper(sharded, ("int4", "onebit:error_feedback=1"), marks=NEWER),
    "replicas": Wrapper(replicas_alone, ("topk:ratio=0.1",), marks=NEWER),
    "HSDP": Wrapper(compressed_hybrid, ("powersgd:rank=1",), 4, marks=(*NEWER, SLOW)),
    "HSDP by torch": Wrapper(hybrid, ("topk:ratio=0.1",), 4, marks=(*NEWER, SLOW)),  # whose shards torch sums
}
HOSTS = {  # of two ranks each, which sum exactly; each rank of one holds a part of what is held back
    "own, hosts": Wrapper(
        own,
        [
            f"hosts:ranks=2+{each}"
            for each in ("topk:ratio=0.05", "onebit:error_feedback=1", "powersgd:rank=2", "int4:core=1")
        ],
        4,
        marks=(SLOW,),
    ),
}
VARIANTS = {  # where a step's buckets, or their numbers, tell differently when it is over
    "own, unused": Wrapper(partial(own, find_unused_parameters=True), ("onebit:error_feedback=1",)),
    "attach, static graph": Wrapper(partial(attached, static_graph=True), ("topk:ratio=0.05",)),
    "HSDP, exact shards": Wrapper(partial(compressed_hybrid, reduce="none"), ("topk:ratio=0.1",), 4, (*NEWER, SLOW)),
    "attach, unused": Wrapper(partial(attached, find_unused_parameters=True), ("onebit:error_feedback=1",)),
}
BY_TORCH = {
    "FSDP2 of replicas": Wrapper(partial(hybrid, averaged="reduce"), ("int4",), 4, (*NEWER, SLOW))
}  # averages over these
EVERY = WRAPPERS | VARIANTS | HOSTS | BY_TORCH
WHOLE = ("attach", "comm_hook", "own", "replicate")  # whose handles are of whole gradients, and take any compressor


def few(wrapper):
    """The specifications of laws that take long."""
    return EVERY[wrapper].specs[: 2 if wrapper == "attach" else 1]


def over(*names, leave_out=(), quick=(), slow=()):
    """Runs a law for each wrapper of these names, or of all; those in `quick` are not slow here, those in `slow` are."""
    names = [name for name in names or WRAPPERS if name not in leave_out]
    marks = {name: [each for each in EVERY[name].marks if each is not SLOW or name not in quick] for name in names}
    marks |= {name: [*marks[name], SLOW] for name in slow}
    return pytest.mark.parametrize("wrapper", [pytest.param(name, marks=marks[name]) for name in names])


class Training:
    """A model of given gradients in a wrapper, with its handle. Steps change no parameter."""

    def __init__(self, wrapper, spec=None, model=None, **options):
        self.wrapper, self.spec, self.rank = wrapper, spec or EVERY[wrapper].specs[0], dist.get_rank()
        self.model, self.handle = EVERY[wrapper].made(model or GivenParts(), self.spec, options)

    def step(self, number, factor=1.0):
        """The averages of a step, by parameter: factor times the gradients of its number."""
        return self.average([[factor * each for each in part] for part in gradients(self.rank, number)])

    def steps(self, first, last):
        return [self.step(number) for number in range(first, last)]

    def average(self, given):
        self.model(given).backward()
        found = {name: whole(each.grad).clone() for name, each in self.parameters() if each.grad is not None}
        self.model.zero_grad()
        return found

    def parameters(self):
        return [(name.removeprefix("module."), each) for name, each in self.model.named_parameters()]

    def swap(self, spec):
        """To a compressor, which is `none` among shards if it is `none`."""
        shards = self.wrapper.startswith("FSDP2")
        if shards or self.wrapper == "HSDP":
            self.handle.swap(reduce=spec if shards else "none" if spec == "none" else "int4")
        if not shards:
            getattr(self.handle, "replicas", self.handle).swap(spec)

    def owed(self):
        """All that is held back: the average of zeros once nothing compresses."""
        self.swap("none")
        return self.average(ZEROS)

    def close(self):
        self.handle.close()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def means(numbers, world_size):
    """What averages of steps with these numbers stand for, added up in float64: {name: the mean over ranks}."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in named(SHAPES)}
    for number in numbers:
        for rank in range(world_size):
            for name, gradient in named(gradients(rank, number)):
                total[name] += gradient.double() / world_size
    return total


def named(parts):
    """The pairs of names and values of all parts."""
    return [(f"parts.{part}.p{place}", value) for part, own in enumerate(parts) for place, value in enumerate(own)]


def added(*averages):
    """The sums by parameter, in float64."""
    return {name: sum(one[name].double() for one in averages) for name in averages[0]}


def counted(state):
    """The step of a state, which that among replicas agrees with where both count."""
    inside = of_rank(state)
    counts = {inside["step"], inside.get("replicas", inside)["step"]} - {0}
    assert len(counts) <= 1, counts
    return max(counts, default=0)


def of_rank(state):
    """A state without the key that FSDP2's have around it."""
    return state if "gradwire" in state else next(iter(state.values()))


def held(state):
    """{(among replicas, name): fields} of a state."""
    inside = of_rank(state)
    kinds = {False: inside, True: inside.get("replicas", {"parameters": {}})}
    return {(kind, name): fields for kind, its in kinds.items() for name, fields in its["parameters"].items()}


def alike(some, others):
    """Whether two states hold the same back, in every bit."""
    return same(held(some), held(others))
