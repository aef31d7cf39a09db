"""What a saved state must agree with before it is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...compress import Compressor
from ...compress import state as states
from ..buckets.layout import layout_of
from .model_memory import OWED

FORMAT = 1
FIELDS = ("step", "buckets", "parameters")


def fingerprint(compressor: Compressor) -> str:
    """The compressor and its options in words, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(compressor))


def header(compressor: Compressor, world_size: int, rank: int) -> dict[str, Any]:
    """What identifies the writer of a state."""
    return {"gradwire": FORMAT, "compressor": fingerprint(compressor), "world_size": world_size, "rank": rank}


def check(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError, saying what differs and what to do, unless this rank and compressor can take the state."""
    missing = [key for key in (*expected, *FIELDS) if key not in saved]
    if missing:
        raise ValueError(f"this is no state of a gradwire hook: it lacks {', '.join(missing)}")
    advice = {
        "gradwire": "load it with the version of gradwire that wrote it",
        "compressor": "attach that compressor, load, then swap() to the new one",
        "world_size": "resume on as many ranks, or go on without this state (what it held back is lost)",
        "rank": "residuals are a rank's own: save and load one file a rank",
    }
    for key, way_out in advice.items():
        if saved[key] != expected[key]:
            raise ValueError(f"the state was saved with {key} = {saved[key]}, here it is {expected[key]}: {way_out}")


def check_parameters(
    saved: Mapping[str, Any], compressor: Compressor, names: Mapping[Tensor, str], world_size: int, rank: int
) -> None:
    """Raise ValueError, naming the parameter, unless every saved tensor fits a parameter of the model."""
    parameters = {name: parameter for parameter, name in names.items()}
    if unknown := sorted(set(saved["parameters"]) - set(parameters)):
        raise ValueError(f"the state has parameters that the model does not train: {', '.join(unknown)}")
    for name, fields in saved["parameters"].items():
        needed = parameters[name].numel() * (2 if parameters[name].is_complex() else 1)
        if OWED in fields and fields[OWED].numel() != needed:
            raise ValueError(
                f"the saved {OWED!r} of parameter {name!r} has {fields[OWED].numel()} elements, not {needed}"
            )
    for bucket in filter(None, saved["buckets"]):
        if unknown := sorted(set(bucket) - set(parameters)):
            raise ValueError(f"the state has buckets of parameters that the model does not train: {', '.join(unknown)}")
        dtype = parameters[bucket[0]].dtype.to_real()
        layout = layout_of({n: parameters[n] for n in bucket}, dtype, torch.device("meta"), world_size, rank)
        states.load(compressor.init(layout), {n: saved["parameters"][n] for n in bucket if n in saved["parameters"]})


def renamed(saved: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state with its parameters under other names."""
    return {
        "step": saved["step"],
        "buckets": [[names[name] for name in bucket if name in names] for bucket in saved["buckets"]],
        "parameters": {names[name]: fields for name, fields in saved["parameters"].items() if name in names},
    }
