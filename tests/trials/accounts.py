"""A model of given gradients, and its account: what each parameter was due, was handed, and still holds back, in float64."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..hooks.given import Given, average
from .gradients import held_back

SHAPES = ((24, 9), (9,), (4, 6, 3), (17,))  # of trials that draw none


class Account:
    """A model in our DDP, or in torch's with our hook."""

    def __init__(self, ours, spec, shapes, dtype=torch.float32, **options):
        self.shapes = shapes
        network = Given(shapes, dtype)
        if ours:
            self.model = gradwire.DistributedDataParallel(network, compressor=spec, **options)
            self.handle = self.model.compression
        else:
            self.model = TorchDDP(network, **options)
            self.handle = gradwire.attach(self.model, spec)

    def held(self):
        """What this rank holds back, flat, by parameter."""
        found = held_back(self.handle.state_dict())
        return [self._total(name, parameter, found) for name, parameter in self.model.module.named_parameters()]

    def _total(self, name, parameter, found):
        total = torch.zeros(parameter.numel(), dtype=torch.float64)
        for first, numbers in found.get(name, ()):
            total[first : first + numbers.numel()] += numbers
        return total

    def average(self, given):
        """The averages of a step, one for each parameter."""
        return list(average(self.model, given).values())

    def step(self, given):
        """The averages of a step, and what was lost or made up of each parameter as a share of its largest number."""
        due = [each.double().flatten() + held for each, held in zip(given, self.held(), strict=True)]
        largest = torch.stack([each.abs().max() for each in due])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        averages = self.average(given)
        gone = [each.double().flatten() + held for each, held in zip(averages, mean(self.held()), strict=True)]
        off = torch.stack([(a - b).abs().max() for a, b in zip(mean(due), gone, strict=True)])
        return averages, (off / largest).tolist()


def mean(numbers):
    """Of all ranks."""
    whole = torch.cat(numbers)
    dist.all_reduce(whole)
    return (whole / dist.get_world_size()).split([each.numel() for each in numbers])
