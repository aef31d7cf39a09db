"""Whatever is wrong with a saved state, it is refused by ValueError before anything changes."""

import copy

import pytest
import torch
from torch import nn

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import SHAPES, attached, average, compressed, gradients, same, wrapped


def with_numbers(state, change, name="p2", field="residual"):
    changed = copy.deepcopy(state)
    changed["parameters"][name][field] = change(state["parameters"][name][field])
    return changed


def servers_refused(rank, world_size):
    """What bad indices and sizes of a server's part raised."""
    ddp, handle = attached("onebit")
    for step in range(3):
        average(ddp, gradients(rank, step, SHAPES))
    state = handle.state_dict()
    fields = state["parameters"]["p2"]
    (field,) = [key for key in fields if key.endswith(".first")]
    changes = [
        with_numbers(state, lambda _: torch.tensor(-1), field=field),
        with_numbers(state, lambda _: torch.tensor(1999), field=field),
        with_numbers(state, lambda _: torch.tensor([0.5]), field=field),
        with_numbers(state, lambda numbers: numbers.view(1, -1), field=field.removesuffix(".first")),
    ]
    del changes[0]["tensors"]
    changes.append(copy.deepcopy(changes[0]))
    del changes[-1]["parameters"]["p2"][field]
    for change in changes:
        with pytest.raises(ValueError):  # noqa: PT011
            handle.load_state_dict(change)
    handle.close()
    return same(handle.state_dict(), state)


def test_a_server_s_part_that_lies_nowhere_is_refused(ranks):
    assert ranks.run(servers_refused, 2) == [True, True]


class Square(nn.Module):
    """A square weight and a convolution, which lie row by row or not."""

    def __init__(self, transposed, channels_last):
        super().__init__()
        weight = torch.zeros(16, 16)
        self.weight = nn.Parameter(weight.t() if transposed else weight)
        kernel = torch.zeros(8, 6, 3, 3)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last) if channels_last else kernel)

    def forward(self, given):
        return (self.weight * given[0]).sum() + (self.kernel * given[1]).sum()


def in_rows(model, state):
    """The residuals of a state, row by row."""
    found = []
    for name, parameter in model.module.named_parameters():
        lying = torch.empty_strided(parameter.shape, parameter.stride())
        lying.as_strided((parameter.numel(),), (1,)).copy_(state["parameters"][name]["residual"].reshape(-1))
        found.append(lying.tolist())
    return found


def orders(rank, world_size, kind):
    """For each pair of memory orders, saved and loaded with: whether each element has its residual."""
    answers = {}
    squares = [(False, False), (True, False), (False, True)]
    for saving in squares:
        model, handle = compressed(kind, Square(*saving), "topk:ratio=0.05")
        for step in range(2):
            average(model, gradients(rank, step, ((16, 16), (8, 6, 3, 3))))
        state = handle.state_dict()
        handle.close()
        for loading in squares:
            again, other = compressed(kind, Square(*loading), "topk:ratio=0.05")
            other.load_state_dict(state)
            answers[saving, loading] = in_rows(again, other.state_dict()) == in_rows(model, state)
            old = {key: value for key, value in state.items() if key not in ("orders", "tensors")}
            if saving == loading:
                other.load_state_dict(old)
            other.close()
    return answers


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_a_state_of_another_memory_order_is_loaded_element_by_element(ranks, kind):
    for answers in ranks.run(orders, 2, kind):
        assert all(answers.values())


def named_into_numbered(rank, world_size):
    """The error of a first step where the names of a loaded state are not the model's."""
    ddp, handle = attached("topk:ratio=0.05")
    average(ddp, gradients(rank, 0, SHAPES))
    state = handle.state_dict()
    unnamed = wrapped(SHAPES, find_unused_parameters=False)
    numbered = gradwire.Handle("topk:ratio=0.05")
    unnamed.register_comm_hook(numbered, compress_bucket)
    numbered.load_state_dict(state)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        average(unnamed, gradients(rank, 1, SHAPES))
    return str(caught.value)


def test_a_state_of_which_no_name_is_known_is_refused_at_the_first_bucket(ranks):
    assert all("call handle.bind(model)" in message for message in ranks.run(named_into_numbered, 2))
