"""What a saved state must agree with: its format, which stands for defaults too, and its form."""

import pytest
import torch

from gradwire.compress import Ranks, compressor
from gradwire.compress.protocol.registry import BASELINES, OF_ALL, OF_FEEDBACK, find, registered
from gradwire.ddp_core.memory.checkpoint import FORMAT, check_form, check_whole, checked

RAISE = (
    "a changed default changes what a saved state means: raise FORMAT of memory/checkpoint.py, then change it here, too"
)
LATTICE = {"block": 128, "rounding": "nearest", "rotate": False, "core": 0}
LOW_RANK = {"rank": 4, "min_compression_rate": 2.0, "power_iterations": 1, "warm_start": True, "seed": 0}
DEFAULTS = {  # of FORMAT 6
    "acp-powersgd": {"rank": 4, "min_compression_rate": 2.0, "seed": 0},
    "adacomp": {"cap": 0.02, "scope": "bucket", "bin": 500},
    "adaptive": {"ladder": "none/int8/int4/int2", "target": 0.85},
    "batched-powersgd": {**LOW_RANK, "payload": "float"},
    "bf16": {"sum": "16bit"},
    "chunktopk": {"ratio": 0.01, "chunk": 512},
    "dgc": {"ratio": 0.001, "momentum": 0.9, "warmup_steps": 0, "clip": None},
    "dropping": {"cap": 0.02, "scope": "bucket", "ratio": 0.01, "sample": 0.01},
    "fp16": {"sum": "16bit"},
    "hosts": {"ranks": None},
    "int2": {**LATTICE, "rotate": True},
    "int4": LATTICE,
    "int8": LATTICE,
    "natural": {"block": 128},
    "none": {},
    "onebit": {"block": 1024, "rotate": True},
    "powersgd": {**LOW_RANK, "payload": "float"},
    "qsgd": {"block": 128, "levels": 127},
    "randomk": {"ratio": 0.01, "block": 256, "seed": 0},
    "ternary": {"block": 128},
    "terngrad": {"block": 1024, "clip": 2.5},
    "topk": {"ratio": 0.01, "k": None, "value_dtype": "fp32", "scope": "bucket"},
}
KEPT = {  # of a residual; all by the other methods
    **dict.fromkeys(("int8", "natural", "qsgd", "terngrad"), 0.0),  # without error feedback unless asked
    **dict.fromkeys(("onebit", "randomk", "chunktopk"), 0.7),
}
FEEDBACK = {"error_feedback": True, "momentum": 0.0, "residual_bits": 32}


def test_the_table_belongs_to_this_format_and_knows_every_method():
    ours = {name for name, method in registered.items() if method.factory.__module__.startswith("gradwire.")}
    assert FORMAT == 6, RAISE
    assert ours | set(BASELINES) == set(DEFAULTS)
    assert {option: default for option, (_, default) in OF_FEEDBACK.items()} == FEEDBACK, RAISE
    assert {option: default for option, (_, default) in OF_ALL.items()} == {"start_iter": 0, "warmup": "none"}, RAISE


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_a_method_are_those_that_saved_states_have(name):
    method = find(name)
    options = {option: default for option, (_, default) in method.options.items()}
    assert {option: each for option, each in options.items() if option not in method.shared} == DEFAULTS[name], RAISE
    if method.lossy:
        assert options["error_feedback"] == KEPT.get(name, 1.0), RAISE


def of_format(number, spec):
    """A state without parameters."""
    header = {"gradwire": number, "compressor": "as it was built then", "world_size": 2, "rank": 0, "spec": spec}
    return {**header, "step": 3, "buckets": [], "parameters": {}, "tensors": 0}


@pytest.mark.parametrize("number", [0, 3, 4.0, "4", None])
def test_a_state_of_a_format_that_is_not_known_is_refused(number):
    with pytest.raises(ValueError, match="load it with the version of gradwire that wrote it"):
        checked(of_format(number, "onebit"), compressor("onebit"), Ranks(2))


FLAWS = {  # {what is wrong: (what it says, the fields of a state that has it)}
    "a step below 0": ("the step of a state is a number of steps, got -1", {"step": -1}),
    "a step that is true": ("the step of a state is a number of steps, got True", {"step": True}),
    "names of no bucket": ("the buckets of a state are lists of names", {"buckets": ["w"]}),
    "a parameter in two buckets": ("have a parameter twice", {"buckets": [["w"], ["v", "w"]]}),
    "hosts that share ranks": ("the ranks_per_host of a state divide its ranks, got 3", {"ranks_per_host": 3}),
    "no mapping of fields": ("the parameters of a state are", {"parameters": {"w": [1.0]}}),
    "no tensor": ("is no tensor but float", {"parameters": {"w": {"residual": 1.0}}}),
    "whole numbers": ("has no real numbers but torch.int64", {"parameters": {"w": {"residual": torch.arange(3)}}}),
    "not finite": ("is not finite everywhere", {"parameters": {"w": {"residual": torch.tensor([1.0, torch.nan])}}}),
    "on no device": ("it is on the meta device", {"parameters": {"w": {"residual": torch.ones(2, device="meta")}}}),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_has_not_the_form_of_a_state_is_refused_with_its_place(flaw):
    words, fields = FLAWS[flaw]
    check_form(of_format(FORMAT, "onebit"))
    with pytest.raises(ValueError, match=words):
        check_form({**of_format(FORMAT, "onebit"), **fields})


def test_a_state_that_has_lost_tensors_is_refused():
    with pytest.raises(ValueError, match="the state has 0 of its 2 tensors"):
        check_whole({**of_format(FORMAT, "onebit"), "tensors": 2})
