"""What `--compute` and `--dilate` say, and what is to be said of their results."""

from __future__ import annotations

import math
import re

from .shipped import load_trace
from .trace import Trace

REAL = "real"
EMULATE = "emulate:"


def chosen_trace(compute: str) -> Trace | None:
    """The trace that `--compute` names; None for `real`. Raises ValueError for anything else.

    >>> chosen_trace("real") is None, chosen_trace("emulate:vgg19").name
    (True, 'vgg19')
    """
    if compute == REAL:
        return None
    if not compute.startswith(EMULATE):
        raise ValueError(f"compute is {REAL}, or {EMULATE} and a trace, as in {EMULATE}resnet50@0.1; got {compute!r}")
    return load_trace(compute.removeprefix(EMULATE))


def labels(trace: Trace | None, dilate: float = 1.0) -> list[str]:
    """What every output says of results with an emulated accelerator; nothing for a real one.

    >>> labels(chosen_trace("emulate:resnet50@0.1"), dilate=4)
    ['emulated compute resnet50, 0.1 s per step', 'dilated 4']
    """
    if trace is None:
        return []
    said = f"emulated compute {trace.name}, {trace.seconds:.3g} s per step"
    return [said] if dilate == 1 else [said, f"dilated {dilate:g}"]


def check_dilation(dilate: float, compute: str) -> None:
    """Raises ValueError for a dilation that is not above 0, and for one of real computation, which takes what it takes."""
    if not 0 < dilate < math.inf:
        raise ValueError(f"dilate is a number above 0, got {dilate}")
    if dilate != 1 and compute == REAL:
        raise ValueError(
            f"dilate {dilate:g} needs an emulated accelerator: give --compute {EMULATE}TRACE, or leave it out"
        )


def dilated(rate: str, dilate: float) -> str:
    """Return a rate divided by `dilate`; 0 stays 0, which is no limit.

    >>> dilated("100mbit", 4), dilated("1gbit", 3), dilated("0", 4)
    ('25mbit', '0.333333gbit', '0')
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*(?:/s)?)", rate.strip())
    if found is None:
        raise ValueError(f"a rate is a number and a unit, such as 100mbit or 1gbit; got {rate!r}")
    return f"{float(found[1]) / dilate:.6g}{found[2]}"
