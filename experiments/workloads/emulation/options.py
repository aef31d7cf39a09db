"""Options of commands that measure steps on a real or an emulated accelerator and network, and what results say of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ...network import lab as netlab
from ...network.lab import NetlabConfig, backend_here
from ...network.link import check_link
from ...network.ranks_config import RanksConfig
from .shipped import load_trace
from .trace import Trace

REAL = "real"
EMULATE = "emulate:"


@dataclass(frozen=True)
class EmulationConfig(RanksConfig):
    """Ranks, and what of their accelerators and network is emulated."""

    compute: str = "real"
    """real trains the model; emulate:TRACE replaces it by the layers of a trace, which take the trace's time"""
    dilate: float = 1.0
    """slow everything emulated down by this factor: multiply the times of the trace, divide the bandwidths"""
    link: str | None = None
    """emulate a network of this bandwidth between all ranks, such as 100mbit; needs no root"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dilation(self.dilate, self.compute)
        check_link(self.link)
        backend_here(self.backend, self.link, self.netlab.hosts)
        _ = self.trace  # checked as it is loaded

    @property
    def trace(self) -> Trace | None:
        """Of the emulated accelerator; None on a real one."""
        return chosen_trace(self.compute)

    @property
    def slowed_link(self) -> str | None:
        """The emulated link, as slow as the dilation makes it."""
        return dilated(self.link, self.dilate) if self.link else None

    @property
    def slowed_netlab(self) -> NetlabConfig:
        """The lab, its links as slow as the dilation makes them."""
        return replace(self.netlab, rate=dilated(self.netlab.rate, self.dilate))

    def labels(self) -> list[str]:
        """What every output says of figures that are not of a real accelerator and network."""
        return labels(self.trace, self.dilate) + netlab.labels(self.link)


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
