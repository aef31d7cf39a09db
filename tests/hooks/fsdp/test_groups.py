"""Groups of parameters of several types: each type is compressed by itself, and what is no number travels as it is."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire

from .given import mesh_of
from .test_oracles import quantized, rows_of


class Mixed(nn.Module):
    """Parameters of several types in one group, which torch takes if those of all types but one are frozen."""

    def __init__(self, codes):
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 7).bfloat16().requires_grad_(False), nn.Linear(6, 6)
        self.codes = (
            nn.Parameter(torch.arange(15, dtype=torch.uint8).view(5, 3), requires_grad=False) if codes else None
        )
        self.seen = []

    def forward(self, inputs):
        self.seen = [each.detach().clone().float() for each in self.parameters()]
        return self.narrow(self.wide(inputs).bfloat16()).float()


def kinds(parameters):
    """Lists of parameters of one type; a module's own ones come before those of its children."""
    return parameters[-4:-2], parameters[-2:], parameters[:-4]


def computed(rank, world_size, spec, codes):
    """The exact weights before each of three steps, those that were computed with, those after a resume; warnings."""
    lines, steps = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    torch.manual_seed(0)
    module = Mixed(codes)
    model = fully_shard(module, mesh=mesh_of(world_size))
    handle = gradwire.attach(model, gather=spec)
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
    logging.getLogger("gradwire").removeHandler(handler)
    return steps, (after, module.seen), [line for line in lines if "uncompressed" in line]


def by_hand(exact, bits, differences):
    """The rows of parameters of one type that ranks compute with in each step, given the exact ones."""
    in_use, sent, found = None, None, []
    for rows in exact:
        if not differences:
            in_use = torch.stack([quantized(row, bits) for row in rows])
        elif in_use is None:
            in_use = rows
        elif not torch.equal(rows, sent):
            in_use = in_use + torch.stack([quantized(row, bits) for row in rows - in_use])
        sent = rows
        found.append(in_use)
    return found


CASES = [("int8", 8, True), ("int4", 4, False), ("hosts:ranks=1+int8", 8, False)]


@pytest.mark.parametrize(("spec", "bits", "codes"), CASES)
def test_each_type_of_a_group_is_quantized_by_itself(ranks, spec, bits, codes):
    for rank, (steps, (after, resumed), lines) in enumerate(ranks.run(computed, 2, spec, codes)):
        for place in range(2):
            exact = [rows_of(kinds(each)[place], 2) for each, _ in steps]
            for (_, seen), rows in zip(steps, by_hand(exact, bits, bits == 4), strict=True):
                torch.testing.assert_close(rows_of(kinds(seen)[place], 2), rows, rtol=1e-2, atol=1e-6)
        for exact, seen in steps:
            assert all(map(torch.equal, exact[:-4], seen[:-4]))
        assert all(map(torch.equal, after, resumed))
        assert len(lines) == (codes and rank == 0)
        assert all("(codes, ...)" in line for line in lines)
