"""Lets tests that ask for a GPU run on the CPU: what they move to a device stays where it is."""

import contextlib
import inspect

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def is_gpu(device):
    """Whether it names a CUDA device; a bare index does, too."""
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


class OnTheCpu(TorchFunctionMode):
    """Every torch function called with a CUDA device is called with the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = (args[0], *("cpu" if is_gpu(argument) else argument for argument in args[1:]))
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def on_the_cpu(ddp):
    """The constructor of a DistributedDataParallel, with its device arguments left out."""
    original = ddp.__init__
    signature = inspect.signature(original)

    def construct(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        for where in (given, given.get("named_arguments", {})):
            where.pop("device_ids", None)
            where.pop("output_device", None)
        original(*bound.args, **bound.kwargs)

    ddp.__init__ = construct


def stand_in(world_size):
    """Make this process believe in `world_size` GPUs, all of which are the CPU. It cannot be undone."""
    OnTheCpu().__enter__()
    moved = nn.Module.to

    def to(self, *args, **kwargs):
        kwargs = {name: "cpu" if is_gpu(value) else value for name, value in kwargs.items()}
        return moved(self, *("cpu" if is_gpu(argument) else argument for argument in args), **kwargs)

    nn.Module.to = to
    nn.Module.cuda = lambda self, device=None: self
    torch.cuda.device_count = lambda: world_size
    torch.cuda.current_device = lambda: "cpu"
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.device = lambda device: contextlib.nullcontext()


def count_no_gpus(decorators):
    """Let tests that are skipped where there are few GPUs run. `decorators`: the module that marks them."""
    decorators.skip_if_no_gpu = lambda test: test
    decorators.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    decorators.nccl_skip_if_lt_x_gpu = lambda *_: lambda test: test
