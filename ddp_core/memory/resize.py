"""The states of all ranks of a training that goes on with more ranks, or fewer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress import Compressor, Ranks
from ...compress.state.tree import Entries, summed
from ..buckets.layout import layout_of
from .bucket_memory import CARRIED_OVER, BucketMemory
from .checkpoint import check_parameters, check_whole, checked, layouts


def merged(
    states: Any, compressor: Compressor, names: Mapping[Tensor, str], frozen: Collection[str] = ()
) -> dict[str, Any]:
    """The state from which every rank goes on, whatever their number: it owes the mean of what all ranks held back.

    So the mean over ranks of what is held back, which is what the average lacks, stays what it was; so does that of momenta.
    All else is rank 0's, and alike on all ranks. Raises ValueError unless `states` are those of all ranks after one step,
    each of them once. `frozen`: as for `checked`.
    """
    given = _ordered(states)
    places = [Ranks(len(given), rank) for rank in range(len(given))]
    ordered = [checked(state, compressor, ranks, frozen) for state, ranks in zip(given, places, strict=True)]
    for state, ranks in zip(ordered, places, strict=True):
        check_parameters(state, compressor, names, ranks)
        check_whole(state)
    if len(steps := {state["step"] for state in ordered}) > 1:
        raise ValueError(f"the states were saved after different steps: {sorted(steps)}")
    parameters = {name: parameter for parameter, name in names.items()}
    buckets = [_buckets(each, compressor, parameters, ranks) for each, ranks in zip(ordered, places, strict=True)]
    held = summed(bucket.held_back() for mine in buckets for bucket in mine)
    mean = {name: held[name] / len(ordered) for name in held}
    if (first := dict(ordered[0])).pop("ranks_per_host", 1) > 1:  # all else, momenta too, was of rank 0's share
        return {**first, "parameters": {name: {CARRIED_OVER: numbers} for name, numbers in mean.items()}}
    momenta = _mean_momenta(buckets)  # first: `_carrying` empties the buckets of rank 0
    entries = _carrying(buckets[0], mean)
    for name, fields in momenta.items():
        entries[name].update(fields)
    return {**first, "parameters": entries}


def _mean_momenta(buckets: Sequence[Sequence[BucketMemory]]) -> Entries:
    """The mean over ranks of what is made of their gradients and is not held back."""
    total: Entries = {}
    for bucket in (bucket for mine in buckets for bucket in mine):
        for name, fields in bucket.averaged().items():
            total[name] = summed([total.get(name, {}), fields])
    return {name: {field: sums[field] / len(buckets) for field in sums} for name, sums in total.items()}


def _ordered(states: Any) -> list[Mapping[str, Any]]:
    """The states by rank."""
    if not isinstance(states, Sequence) or not all(isinstance(state, Mapping) for state in states):
        raise ValueError(f"resize=True takes a list of the states of all ranks, got {type(states).__name__}")
    ranks = [(state.get("rank"), state.get("world_size")) for state in states]
    expected = [(rank, len(states)) for rank in range(len(states))]
    if not states or len(ranks) != len(set(map(str, ranks))) or any(each not in expected for each in ranks):
        raise ValueError(
            f"resize=True takes the states of all ranks, each of them once; got (rank, world_size) {ranks}"
        )
    return sorted(states, key=lambda state: int(state["rank"]))


def _buckets(
    state: Mapping[str, Any], compressor: Compressor, parameters: Mapping[str, Tensor], ranks: Ranks
) -> list[BucketMemory]:
    """The memory of one rank: its buckets, and one for each parameter that was in none."""
    cpu, listed = torch.device("cpu"), {name for names in state["buckets"] for name in names}
    found = list(layouts(state, parameters, cpu, ranks))
    for name in state["parameters"]:
        if name not in listed:
            dtype = parameters[name].dtype.to_real()
            found.append(layout_of({name: parameters[name]}, dtype, cpu, ranks))
    buckets = [BucketMemory(compressor, layout, state["step"]) for layout in found]
    for bucket in buckets:
        bucket.load({name: state["parameters"][name] for name in bucket.layout.names if name in state["parameters"]})
    return buckets


def _carrying(buckets: Sequence[BucketMemory], held: Mapping[str, Tensor]) -> Entries:
    """Return the memory of one rank, which holds back nothing but what it is given."""
    entries: Entries = {}
    for bucket in buckets:
        bucket.rescale(0.0)
        entries.update(bucket.save())
    for name, numbers in held.items():
        entries.setdefault(name, {})[CARRIED_OVER] = numbers
    return entries
