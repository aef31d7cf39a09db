"""The states of all ranks as one value, which a framework saves on rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .checkpoint import FORMAT

RANKS = "ranks"


def all_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value of the states of all ranks, in rank order.

    They lie in a tuple, which torch.distributed.checkpoint takes as one value, whatever is inside.
    """
    return {"gradwire": FORMAT, RANKS: tuple(states)}


def is_gathered(saved: Any) -> bool:
    """Whether a state is that of all ranks."""
    return isinstance(saved, Mapping) and RANKS in saved


def states_of(saved: Any) -> Sequence[Mapping[str, Any]]:
    """The states of all ranks. Raises ValueError for what `all_states` did not make."""
    states = saved[RANKS] if is_gathered(saved) else None
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(
            f"the first rank scatters what its gather_state_dict() returned; got {type(saved).__name__}"
            + (f" of {', '.join(map(repr, saved)) or 'nothing'}" if isinstance(saved, Mapping) else "")
        )
    return states


def on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose tensors another process can take, which may not see this one's device."""
    parameters = {
        name: {field: numbers.cpu() for field, numbers in fields.items()}
        for name, fields in state["parameters"].items()
    }
    return {**state, "parameters": parameters}
