"""What is said of an optimizer that is unknown, another model's, or one of several."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import specification

from ..torch_versions import replicate_of_fsdp
from .given import compressed
from .replicate.given import network as replicated

EVERY_KIND = pytest.mark.parametrize("kind", ["attached", "hooked", "own"])


def said(caplog, kind, spec, chosen):
    """The warnings while a model of two layers gets the compressor; `chosen` makes its optimizer."""
    caplog.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compressed(kind, model, spec, optimizer=chosen(model))[1].close()
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


@EVERY_KIND
def test_an_optimizer_that_matters_and_is_unknown_foreign_or_incomplete_is_said_once(group, caplog, kind):
    (unknown,) = said(caplog, kind, "int4", none)
    assert "int4 keeps its default error feedback" in unknown
    assert "int4:error_feedback=false" in unknown
    assert "Pass optimizer=" in unknown
    (of_another,) = said(caplog, kind, "int4", foreign)
    assert "updates none of the model's 4 trainable parameters" in of_another
    assert said(caplog, kind, "bf16", foreign) == [of_another]
    (incomplete,) = said(caplog, kind, "int4", one_of_two)
    assert "updates 2 of the model's 4 trainable parameters, and not 0.weight, 0.bias." in incomplete


@EVERY_KIND
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
def test_nothing_is_said_where_it_is_known_or_changes_nothing(group, caplog, kind, spec, chosen):
    assert not said(caplog, kind, spec, chosen)


@EVERY_KIND
def test_a_swap_takes_the_optimizer_given_before_and_warns_without_any(group, caplog, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for chosen, swapped, warnings in ((all_of, "int4:error_feedback=false", 0), (none, "int4", 1)):
        caplog.clear()
        optimizer = chosen(model)
        _, handle = compressed(kind, model, "bf16", optimizer=optimizer)
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
