"""Groups of parameters of several types: each type is compressed by itself, and what is no number travels as it is."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

import gradwire

from ...ddp_core.errors import logged
from ...torch_versions import fsdp_of_integers
from .given import mesh_of
from .test_oracles import quantized, rows_of, sizes_of


class Mixed(nn.Module):
    """Parameters of several types in one group, which torch takes if those of all types but one are frozen."""

    def __init__(self, codes):
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 7).bfloat16().requires_grad_(False), nn.Linear(6, 6)
        numbers = torch.arange(15, dtype=torch.uint8).view(5, 3)
        self.codes = nn.Parameter(numbers, requires_grad=False) if codes else None
        self.seen = []

    def forward(self, inputs):
        self.seen = [each.detach().clone().float() for each in self.parameters()]
        return self.narrow(self.wide(inputs).bfloat16()).float()


def kinds(parameters):
    """Lists of parameters of one type; a module's own ones come before those of its children."""
    return parameters[-4:-2], parameters[-2:], parameters[:-4]


def computed(rank, world_size, spec, codes):
    """The exact weights before each of three steps, those that were computed with, those after a resume; warnings."""
    with logged("uncompressed") as lines:
        found = steps_of(world_size, spec, codes)
    return *found, lines


def steps_of(world_size, spec, codes):
    steps = []
    torch.manual_seed(0)
    module = Mixed(codes)
    model = fully_shard(module, mesh=mesh_of(world_size))
    handle = gradwire.attach(model, gather=spec, reduce="none")
    optimizer = torch.optim.SGD(model.wide.parameters(), lr=0.1)
    for step in range(3):
        exact = [each.full_tensor().detach().clone().float() for each in model.parameters()]
        model(torch.full((2, 6), step + 1.0)).square().mean().backward()
        steps.append((exact, module.seen))
        optimizer.step()
        optimizer.zero_grad()
    state = handle.state_dict()
    with torch.no_grad():
        model(torch.ones(2, 6))
        after = module.seen
        model.reshard()
        handle.load_state_dict(state)
        model(torch.ones(2, 6))
    handle.close()
    return steps, (after, module.seen)


def by_hand(exact, bits, differences):
    """The rows of parameters of one type that two ranks compute with in each step, given the exact ones."""
    in_use, sent, found = None, None, []
    for parts in exact:
        rows, sizes = rows_of(parts, 2), sizes_of(parts, 2)
        if not differences:
            in_use = torch.stack([quantized(row, bits, sizes) for row in rows])
        elif in_use is None:
            in_use = rows
        elif not torch.equal(rows, sent):
            in_use = in_use + torch.stack([quantized(row, bits, sizes) for row in rows - in_use])
        sent = rows
        found.append(in_use)
    return found


CASES = [pytest.param("int8", 8, True, marks=fsdp_of_integers), ("int4", 4, False), ("hosts:ranks=1+int8", 8, False)]


@pytest.mark.parametrize(("spec", "bits", "codes"), CASES)
def test_each_type_of_a_group_is_quantized_by_itself(ranks, spec, bits, codes):
    for rank, (steps, (after, resumed), lines) in enumerate(ranks.run(computed, 2, spec, codes)):
        for place in range(2):
            exact = [kinds(each)[place] for each, _ in steps]
            for (_, seen), rows in zip(steps, by_hand(exact, bits, bits == 4), strict=True):
                torch.testing.assert_close(rows_of(kinds(seen)[place], 2), rows, rtol=1e-2, atol=1e-6)
        for exact, seen in steps:
            assert all(map(torch.equal, exact[:-4], seen[:-4]))
        assert all(map(torch.equal, after, resumed))
        assert len(lines) == (codes and rank == 0)
        assert all("(codes, ...)" in line for line in lines)


class Float8Weight(torch.Tensor):
    """A weight that has FSDP2 gather float8 numbers of it, as those of torchao's float8 linear do."""

    KEPT = ("detach", "clone", "new_zeros", "empty_like", "slice", "split", "view", "as_strided", "copy_", "_to_copy")

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), dtype=numbers.dtype, device=numbers.device
        )

    def __init__(self, numbers):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        arguments, options = tree_map_only(cls, lambda each: each.numbers, (arguments, options or {}))
        found = operation(*arguments, **options)
        return tree_map_only(torch.Tensor, cls, found) if operation.overloadpacket.__name__ in cls.KEPT else found

    def fsdp_pre_all_gather(self, mesh):
        return (self.numbers.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is None:
            wide = gathered[0].to(dtype)
            return wide, (wide,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[0])


class Added(nn.Sequential):
    """Modules whose outputs are added up."""

    def forward(self, inputs):
        return sum(part(inputs).sum() for part in self)


def beside_float8(rank, world_size, spec, bias):
    """The weights in use of a float8 linear and of another one in each of two steps, and their gradients; warnings."""
    torch.manual_seed(0)
    model, mesh = Added(nn.Linear(6, 4, bias), nn.Linear(6, 4)), mesh_of(world_size)
    model[0].weight = nn.Parameter(Float8Weight(model[0].weight.detach()))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    seen, means = [], []
    for part in model:
        part.register_forward_pre_hook(
            lambda module, _: seen.append([each.detach().clone() for each in module.parameters()])
        )
    handle = gradwire.attach(model, gather=spec, reduce="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged("uncompressed") as lines:
        for _ in range(2):
            model(torch.full((2, 6), rank + 1.0)).backward()
            means.append([each.grad.full_tensor() for each in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    handle.state_dict()
    handle.close()
    return seen, means, lines


@pytest.mark.parametrize(("spec", "bits", "bias"), [("int8", 8, True), ("int4", 4, False)])
def test_weights_that_are_gathered_in_float8_are_left_alone_and_a_warning_names_them(ranks, spec, bits, bias):
    torch.manual_seed(0)
    parts = [list(nn.Linear(6, 4, of_part).parameters()) for of_part in (bias, True)]
    exact = [
        [[each.detach() - (0.3, 0.2)[place] * step for place, each in enumerate(part)] for part in parts]
        for step in range(2)
    ]
    quantized_rows = by_hand([others for _, others in exact], bits, bits == 4)
    names = "(0.weight, 0.bias, ...)" if bias else "(0.weight, ...)"
    for rank, (seen, means, lines) in enumerate(ranks.run(beside_float8, 2, spec, bias)):
        for step, rows in enumerate(quantized_rows):
            (weight, *rest), others = seen[2 * step : 2 * step + 2]
            torch.testing.assert_close(weight, exact[step][0][0].to(torch.float8_e4m3fn).float())
            torch.testing.assert_close(rest, exact[step][0][1:])
            torch.testing.assert_close(rows_of(others, 2), rows)
            assert [numbers.unique().tolist() for numbers in means[step]] == [[3.0], *[[2.0]] * bias, [3.0], [2.0]]
        assert len(lines) == (rank == 0)
        assert all(names in line for line in lines)
