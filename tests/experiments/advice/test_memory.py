"""Compressors that need more memory than there is are left out, with a reason."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradwire
from gradwire.compress import Ranks
from gradwire.experiments.advice import rank_group
from gradwire.experiments.advice.advise import _fitting
from gradwire.experiments.advice.candidates import candidates
from gradwire.experiments.advice.rank_group import RankGroup

NETWORK = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
SPECS = ["bf16", "int4", "int2:residual_bits=8", "hosts+int4"]


def fitting(free, specs=SPECS):
    parameters = dict(NETWORK.named_parameters())
    training = SimpleNamespace(parameters=parameters)
    computation = SimpleNamespace(ready=dict.fromkeys(parameters, 0.0))
    here = SimpleNamespace(free_memory=lambda: free, ranks=Ranks(4, per_host=2))
    kept, left_out = _fitting(candidates(specs), training, computation, here, None)
    return [each.spec for each in kept], left_out


def peak(spec):
    return gradwire.plan(NETWORK, spec, world_size=4).peak_bytes


def test_what_takes_more_than_is_free_is_tried_with_its_residual_in_8_bits_and_left_out_with_both_numbers():
    whole, narrow, narrower = map(peak, ("int4", "int4:residual_bits=8", "int2:residual_bits=8"))
    assert narrower < narrow < whole
    took = f"int4 takes {whole / 1e6:.3g} MB on each rank, and {{:.3g}} MB are free beside the model and its copy"
    kept, left_out = fitting(whole - 1)
    assert kept[:4] == ["none", "bf16", "int4:residual_bits=8", "int2:residual_bits=8"]
    assert left_out[0] == took.format((whole - 1) / 1e6) + ": int4:residual_bits=8 is tried instead"
    assert fitting(whole)[0][:4] == ["none", "bf16", "int4", "int2:residual_bits=8"]
    kept, left_out = fitting(narrow - 1)
    assert kept[:3] == ["none", "bf16", "int2:residual_bits=8"]
    assert left_out[0] == took.format((narrow - 1) / 1e6)
    assert fitting(narrower - 1)[0][:2] == ["none", "bf16"]


@pytest.mark.parametrize(("free", "kept"), [(0, ["none", "bf16"]), (None, ["none", *SPECS])])
def test_what_gives_nothing_up_stays_and_so_does_all_where_nobody_knows(free, kept):
    assert fitting(free)[0] == kept


@pytest.mark.parametrize(
    ("told", "free"),
    [([["a", 90], ["a", 90], ["b", 40]], 40), ([["a", 60], ["a", 60]], 30), ([["a", 9], ["b", None]], None)],
)
def test_ranks_of_a_machine_share_its_memory_and_the_least_counts(told, free, monkeypatch):
    monkeypatch.setattr(RankGroup, "gather", lambda self, value: told)
    monkeypatch.setattr(rank_group, "free_bytes", lambda device: 0)
    assert RankGroup(None, torch.device("cpu"), Ranks(3), 1.0, True).free_memory() == free
