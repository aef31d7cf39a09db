"""A module's gradients are collected, averaged and handed out in one buffer, of the memory of gradients that are gone."""

import torch
from torch import nn

import gradwire

from .given import inputs, local, network


def places(rank, world_size):
    """(beginning, end) of what torch was given for gradients, in turn; and the place of each gradient after backward."""
    model, given = network(), []
    handle = gradwire.attach(model, "int8")
    for module in handle._modules:
        comm = module.group._reduce_scatter_comm
        comm.allocate = noting(comm.allocate, given)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
    found = [local(each.grad).data_ptr() for each in model.parameters()]
    handle.close()
    return given, found, [type(module.group._reduce_scatter_comm).__name__ for module in handle._modules]


def noting(allocate, given):
    def noted(*arguments, **options):
        memory = allocate(*arguments, **options)
        given.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    return noted


def test_gradients_lie_where_torch_collected_them_without_a_copy(ranks):
    for given, found, afterwards in ranks.run(places, 2):
        assert len(given) == 2 * 2 * 3  # steps, places that torch asks for, modules
        assert given[::2] == given[1::2]
        assert all(any(first <= place < end for first, end in given[-6:]) for place in found)
        assert afterwards == ["DefaultReduceScatter"] * 3


def places_of_steps(rank, world_size):
    """The places of large gradients after each of three steps, each of which lets those of the one before go."""
    model, seen = network(nn.Sequential(*(nn.Linear(600, 600) for _ in range(3))), ("0", "1", "2", "")), []
    handle = gradwire.attach(model, "int8")
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 600)).square().mean().backward()
        seen.append({local(each.weight.grad).data_ptr() for each in model})
    handle.close()
    return seen


def test_large_gradients_lie_where_those_of_the_step_before_lay(ranks):
    for first, *others in ranks.run(places_of_steps, 2):
        assert others == [first] * 2
