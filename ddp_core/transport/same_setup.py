"""The comparison of setups before ranks train, as texts: one error on all of them where these differ."""

from __future__ import annotations

from .protocol import Transport
from .rank_messages import exchange


def alike(compared: str, shown: str) -> str:
    """Return a text for ranks to agree on, of which messages show another one."""
    return f"{compared}\0{shown}"


def compared(text: str) -> str:
    """Return the part of a text that ranks compare."""
    return text.split("\0")[0]


def shown(text: str) -> str:
    """Return the part of a text that messages show."""
    return text.split("\0")[-1]


def told(text: str, other: str) -> tuple[str, str]:
    """Return what messages show of two texts that differ: what ranks compare, where the rest is the same."""
    form = compared if shown(text) == shown(other) else shown
    return form(text), form(other)


def agree(text: str, transport: Transport, *, what: str, way_out: str = "") -> None:
    """Raise ValueError on every rank unless all ranks pass the same text, which may be one of `alike`."""
    texts = exchange(text, transport, what=what)
    differing = [rank for rank, other in enumerate(texts) if compared(other) != compared(texts[0])]
    if differing:
        here, there = told(texts[0], texts[differing[0]])
        raise ValueError(
            f"the ranks were set up differently: rank 0 has {here}, rank {differing[0]} has {there}"
            + (f" (in all, ranks {differing} differ from rank 0)" if len(differing) > 1 else "")
            + way_out
        )
