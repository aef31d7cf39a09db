"""What is said of an optimizer that is unknown, another model's, or one of several."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.compress import specification

from ..torch_versions import replicate_of_fsdp
from .replicate.given import network as replicated


def attached(model, spec, optimizer):
    return gradwire.attach(TorchDDP(model), spec, optimizer=optimizer)


def hooked(model, spec, optimizer):
    (ddp := TorchDDP(model)).register_comm_hook(None, gradwire.comm_hook(spec, optimizer=optimizer))
    return gradwire.handle_of(ddp)


def ours(model, spec, optimizer):
    return gradwire.DistributedDataParallel(model, compressor=spec, optimizer=optimizer).compression


def said(caplog, made, spec, chosen):
    """The warnings while a model of two layers gets the compressor; `chosen` makes its optimizer."""
    caplog.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made(model, spec, chosen(model)).close()
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def none(model):
    return None


def all_of(model):
    return torch.optim.AdamW(model.parameters())


def two(model):
    return [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[1].parameters())]


def foreign(model):
    return torch.optim.AdamW(nn.Linear(4, 4).parameters())


def of_copies(model):
    return torch.optim.AdamW([each.detach().double() for each in model.parameters()])


def of_some_copies(model):
    return torch.optim.AdamW([model[0].weight, *(each.detach().double() for each in list(model.parameters())[1:])])


def one_of_two(model):
    return two(model)[1]


@pytest.mark.parametrize("made", [attached, hooked, ours])
def test_an_optimizer_that_matters_and_is_unknown_foreign_or_incomplete_is_said_once(group, caplog, made):
    (unknown,) = said(caplog, made, "int4", none)
    assert "int4 keeps its default error feedback" in unknown
    assert "int4:error_feedback=false" in unknown
    assert "Pass optimizer=" in unknown
    (of_another,) = said(caplog, made, "int4", foreign)
    assert "updates none of the model's 4 trainable parameters" in of_another
    assert said(caplog, made, "bf16", foreign) == [of_another]
    (incomplete,) = said(caplog, made, "int4", one_of_two)
    assert "updates 2 of the model's 4 trainable parameters, and not 0.weight, 0.bias." in incomplete


@pytest.mark.parametrize("made", [attached, hooked, ours])
@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("int4", all_of),
        ("int4", two),
        ("int4", of_copies),
        ("int4", of_some_copies),
        ("int4:error_feedback=true", none),
        ("int4:error_feedback=false", one_of_two),
        ("int8", none),
        ("bf16", one_of_two),
        ("none", none),
    ],
)
def test_nothing_is_said_where_it_is_known_or_changes_nothing(group, caplog, made, spec, chosen):
    assert not said(caplog, made, spec, chosen)


@pytest.mark.parametrize("made", [attached, hooked, ours])
def test_a_swap_takes_the_optimizer_given_before_and_warns_without_any(group, caplog, made):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for chosen, swapped, warnings in ((all_of, "int4:error_feedback=false", 0), (none, "int4", 1)):
        caplog.clear()
        optimizer = chosen(model)
        handle = made(model, "bf16", optimizer)
        handle.swap("int4")
        assert specification(handle.compressor) == swapped
        assert sum("keeps its default error feedback" in each.getMessage() for each in caplog.records) == warnings
        caplog.clear()
        handle.swap("int4", optimizer=foreign(model))
        assert "updates none of the model's 4 trainable parameters" in caplog.text
        handle.close()


@replicate_of_fsdp
@pytest.mark.parametrize("of_another", [False, True])
def test_a_replicated_model_knows_its_own_optimizer(group, caplog, of_another):
    model = replicated()
    optimizer = torch.optim.AdamW((replicated() if of_another else model).parameters())
    gradwire.attach(model, "int8", optimizer=optimizer).close()
    assert ("updates none of the model's 6 trainable parameters" in caplog.text) == of_another
