"""What a function sees of averages before they become gradients, what it may change, and ranks that compare parameters."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, compressed, gradients

SHAPES = ((40, 30), (8, 3, 3, 3), (10, 200), (3,))
SPECS = ["none", "int8", "topk:ratio=0.1", "powersgd:rank=1,min_compression_rate=1"]


def wrapped(kind, spec, **options):
    module = Given(SHAPES).to(memory_format=torch.channels_last)
    return compressed(kind, module, spec, {"bucket_cap_mb": 0.002, **options})


def seen(rank, world_size, kind, spec, options):
    """Whether the function sees what become gradients, whether these are what it makes of them, and None removes it."""
    model, handle = wrapped(kind, spec, **options)
    found, right = {}, []

    def keep_and_mask(averages):
        assert not set(averages) & set(found)  # each parameter once a step
        found.update({name: average.clone() for name, average in averages.items()})
        for average in averages.values():
            average[0] = 0  # a row of the parameter, wherever it lies

    for function in (keep_and_mask, keep_and_mask, None):
        found.clear()
        handle.on_average(function)
        model.zero_grad()
        model(gradients(rank, 0, SHAPES)).backward()
        for name, parameter in model.module.named_parameters():
            if function is None:
                right.append(bool(parameter.grad[0].any()) or spec not in ("none", "int8"))
            else:
                right.append(torch.equal(found[name][1:], parameter.grad[1:]) and not parameter.grad[0].any())
        right.append(len(found) == (0 if function is None else len(SHAPES)))
    handle.close()
    return all(right)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["own", "attached", "hooked"])
def test_a_function_sees_each_average_once_and_changes_gradients(ranks, kind, spec):
    for views in (True, False):
        assert ranks.run(seen, 2, kind, spec, {"gradient_as_bucket_view": views}) == [True, True]


class Waves(nn.Module):
    """With complex numbers in two shapes."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(5, 3, dtype=torch.complex64))
        self.planes = nn.Parameter(torch.ones(8, 3, 3, 3, dtype=torch.complex64))

    def forward(self, factor):
        return sum((each * torch.arange(each.numel()).view_as(each) * factor).abs().sum() for each in self.parameters())


def seen_of_complex(rank, world_size, spec, views):
    """Whether the function sees what become gradients, before the model takes another memory format and after it."""
    model, found, right = TorchDDP(Waves(), gradient_as_bucket_view=views), {}, []
    handle = gradwire.attach(model, spec)
    handle.on_average(lambda averages: found.update({name: each.clone() for name, each in averages.items()}))
    for step in range(4):
        if step == 2:
            model.module.planes.data = model.module.planes.data.contiguous(memory_format=torch.channels_last)
        model.zero_grad()
        model(rank + step + 1j).backward()
        right += [torch.equal(found[name], each.grad) for name, each in model.module.named_parameters()]
    handle.close()
    return all(right)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1"])
def test_a_function_sees_complex_averages_of_torchs_ddp(ranks, spec):
    for views in (True, False):
        assert ranks.run(seen_of_complex, 2, spec, views) == [True, True]


def residual_after(rank, world_size, masks):
    """The residual where a function clears all averages, or none."""
    model, handle = wrapped("own", "topk:ratio=0.1")
    handle.on_average((lambda averages: [each.zero_() for each in averages.values()]) if masks else None)
    for step in range(3):
        model(gradients(rank, step, SHAPES)).backward()
        model.zero_grad()
    state = handle.state_dict()["parameters"]
    handle.close()
    return [fields["residual"] for fields in state.values()]


def test_what_it_changes_is_in_no_residual(ranks):
    for left, right in zip(ranks.run(residual_after, 2, True), ranks.run(residual_after, 2, False), strict=True):
        assert all(map(torch.equal, left, right))


def sharded(rank, world_size, spec):
    """Whether FSDP2's shards of gradients are what a function saw and masked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world_size,)))
    handle, found = gradwire.attach(model, reduce=spec), {}

    def double(averages):
        found.update({name: average.clone() for name, average in averages.items()})
        for average in averages.values():
            average.mul_(2)

    handle.on_average(double)
    model(torch.full((3, 6), rank + 1.0)).square().mean().backward()
    right = []
    for name, parameter in model.named_parameters():
        mine = parameter.grad.to_local()
        right.append(torch.equal(mine, 2 * found[name][: len(mine)]))
    handle.close()
    return right


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_it_sees_the_shards_of_fsdp2(ranks, spec):
    assert ranks.run(sharded, 2, spec) == [[True] * 4] * 2


def compared(rank, world_size, kind):
    """What comparing parameters raises: nothing at first, then what rank 1 has changed."""
    model, handle = wrapped(kind, "int8")
    model(gradients(rank, 0, SHAPES)).backward()
    handle.check_parameters()
    if rank == 1:
        with torch.no_grad():
            model.module.p2[3, 4] = 1.0
    with pytest.raises(RuntimeError) as caught:
        handle.check_parameters()
    handle.close()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_ranks_compare_their_parameters_and_name_those_that_differ(ranks, kind):
    for text in ranks.run(compared, 2, kind):
        assert text.startswith("the parameters of ranks [1] differ from those of rank 0: p2. ")
