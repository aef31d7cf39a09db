"""A model whose gradients are given, so that an oracle can know what a hook was handed; and what is said and saved."""

import io

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

SHAPES = ((40, 30), (40,), (10, 200), (3,))


class Given(nn.Module):
    """Parameters p0, p1, ... of zeros; `forward(gradients)` is a loss whose gradients these are, bit for bit."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum(
            (parameter * gradient).sum() for parameter, gradient in zip(self.parameters(), gradients, strict=True)
        )


def gradients(rank, step, shapes, dtype=torch.float32, quantum=None):
    """Standard normal numbers; multiples of `quantum`, if it is given."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    numbers = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return numbers if quantum is None else [(number / quantum).round() * quantum for number in numbers]


def wrapped(shapes, dtype=torch.float32, **options):
    """The model in DDP; with find_unused_parameters its buckets stay as they are from the first step on."""
    return DistributedDataParallel(Given(shapes, dtype), **{"find_unused_parameters": True, **options})


def compressed(kind, module, spec, of_ddp=None, **options):
    """A module in gradwire's "own" DDP, or in torch's with a compressor that is "attached" or "hooked"; and the handle."""
    of_ddp = of_ddp or {}
    if kind == "own":
        model = gradwire.DistributedDataParallel(module, compressor=spec, **of_ddp, **options)
        return model, model.compression
    model = DistributedDataParallel(module, **of_ddp)
    if kind == "attached":
        return model, gradwire.attach(model, spec, **options)
    model.register_comm_hook(None, gradwire.comm_hook(spec, **options))
    return model, gradwire.handle_of(model)


def attached(spec, **options):
    """A model of SHAPES in several buckets, with its handle."""
    ddp = wrapped(SHAPES, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec, **options)


def steps(ddp, rank, first, last):
    """The averages of these steps, by name."""
    return [average(ddp, gradients(rank, step, SHAPES)) for step in range(first, last)]


def average(ddp, given):
    """What the hook makes of a step's gradients: {name: average}."""
    ddp(given).backward()
    averages = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
    ddp.zero_grad()
    return averages


def same(left, right):
    """Whether two trees of dicts, lists, tensors and other values are equal in every bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def through_file(state):
    """What torch saves and loads."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
