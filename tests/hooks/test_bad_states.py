"""Whatever is wrong with a saved state, it is refused by ValueError before anything changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.hooks.torch_ddp import compress_bucket

from .given import average, gradients, wrapped
from .test_handle import same

SHAPES = ((40, 30), (40,), (10, 200), (3,))
SPECS = ["topk:ratio=0.05", "onebit:error_feedback=1", "powersgd:rank=2"]
NUMBERS = {  # what a residual may have become
    "nan": lambda numbers: numbers.clone().index_fill_(0, torch.tensor([0]), torch.nan),
    "inf": lambda numbers: numbers.clone().index_fill_(0, torch.tensor([0]), -torch.inf),
    "flat": lambda numbers: numbers.reshape(-1),
    "one more axis": lambda numbers: numbers.unsqueeze(0),
    "sparse": lambda numbers: numbers.to_sparse(),
    "meta": lambda numbers: numbers.to("meta"),
    "int": lambda numbers: numbers.int(),
    "bool": lambda numbers: numbers.bool(),
    "complex": lambda numbers: numbers.to(torch.complex64),
    "list": lambda numbers: numbers.tolist(),
    "None": lambda numbers: None,
}
STATES = {  # what a state may have become
    "a list": lambda state: [state],
    "None": lambda state: None,
    "a step of text": lambda state: {**state, "step": "3"},
    "half a step": lambda state: {**state, "step": 2.5},
    "a step below 0": lambda state: {**state, "step": -1},
    "a tensor for the world size": lambda state: {**state, "world_size": torch.tensor([2, 2])},
    "no list of buckets": lambda state: {**state, "buckets": 5},
    "buckets of numbers": lambda state: {**state, "buckets": [[0, 1]]},
    "a bucket twice": lambda state: {**state, "buckets": [*state["buckets"], *state["buckets"]]},
    "parameters in a list": lambda state: {**state, "parameters": list(state["parameters"].items())},
    "numbers for names": lambda state: {**state, "parameters": dict(enumerate(state["parameters"].values()))},
    "no fields": lambda state: {**state, "parameters": dict.fromkeys(state["parameters"])},
    "emptied": lambda state: {**state, "parameters": {name: {} for name in state["parameters"]}},
    "emptied and old": lambda state: {
        **{key: value for key, value in state.items() if key != "tensors"},
        "parameters": {name: {} for name in state["parameters"]},
    },
    "without parameters": lambda state: {**state, "parameters": {}},
    "another field": lambda state: {**state, "parameters": renamed_fields(state["parameters"])},
}


def renamed_fields(parameters):
    return {name: {f"{field}s": each for field, each in fields.items()} for name, fields in parameters.items()}


def attached(spec, shapes=SHAPES):
    ddp = wrapped(shapes, bucket_cap_mb=0.002, find_unused_parameters=False)
    return ddp, gradwire.attach(ddp, spec)


def with_numbers(state, change, name="p2", field="residual"):
    changed = copy.deepcopy(state)
    changed["parameters"][name][field] = change(state["parameters"][name][field])
    return changed


def refused(rank, world_size, spec):
    """What each bad state raised, and whether all was as before."""
    ddp, handle = attached(spec)
    untouched, other = attached(spec)
    for step in range(3):
        for model in (ddp, untouched):
            average(model, gradients(rank, step, SHAPES))
    state = handle.state_dict()
    bad = {kind: with_numbers(state, change) for kind, change in NUMBERS.items()}
    bad |= {kind: change(state) for kind, change in STATES.items()}
    answers = {}
    for kind, each in bad.items():
        try:
            handle.load_state_dict(each)
            answers[kind] = "accepted"
        except Exception as error:
            answers[kind] = type(error).__name__
    unchanged = same(handle.state_dict(), state)
    goes_on = [
        same(average(ddp, gradients(rank, step, SHAPES)), average(untouched, gradients(rank, step, SHAPES)))
        for step in range(3, 5)
    ]
    handle.close()
    other.close()
    return answers, unchanged, all(goes_on)


@pytest.mark.parametrize("spec", SPECS)
def test_a_bad_state_is_refused_by_value_error_and_changes_nothing(ranks, spec):
    for answers, unchanged, goes_on in ranks.run(refused, 2, spec):
        assert set(answers.values()) == {"ValueError"}, answers
        assert unchanged
        assert goes_on


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


def orders(rank, world_size, ours):
    """For each pair of memory orders, saved and loaded with: whether each element has its residual."""
    answers = {}
    kinds = [(False, False), (True, False), (False, True)]

    def model_of(kind):
        if ours:
            model = gradwire.DistributedDataParallel(Square(*kind), compressor="topk:ratio=0.05")
            return model, model.compression
        model = TorchDDP(Square(*kind))
        return model, gradwire.attach(model, "topk:ratio=0.05")

    for saving in kinds:
        model, handle = model_of(saving)
        for step in range(2):
            average(model, gradients(rank, step, ((16, 16), (8, 6, 3, 3))))
        state = handle.state_dict()
        handle.close()
        for loading in kinds:
            again, other = model_of(loading)
            other.load_state_dict(state)
            answers[saving, loading] = in_rows(again, other.state_dict()) == in_rows(model, state)
            old = {key: value for key, value in state.items() if key not in ("orders", "tensors")}
            if saving == loading:
                other.load_state_dict(old)
            other.close()
    return answers


@pytest.mark.parametrize("ours", [True, False])
def test_a_state_of_another_memory_order_is_loaded_element_by_element(ranks, ours):
    for answers in ranks.run(orders, 2, ours):
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
