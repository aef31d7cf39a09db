"""Options of commands that measure steps on a real or an emulated accelerator and network, and what results say of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...network import lab as netlab
from ...network.lab import NetlabConfig, backend_here
from ...network.link import BITS_PER_BYTE, check_link, parse_rate
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
    """slow everything emulated down by this factor: multiply the times of the trace and the delays, divide the
    bandwidths"""
    link: str | None = None
    """emulate a network of this bandwidth between all ranks, such as 100mbit; needs no root"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.dilate < math.inf:
            raise ValueError(f"dilate is a number above 0, got {self.dilate}")
        if self.dilate != 1 and self.compute == REAL:
            raise ValueError(
                f"dilate {self.dilate:g} needs an emulated accelerator: give --compute {EMULATE}TRACE, or leave it out"
            )
        check_link(self.link)
        backend_here(self.backend, self.link, self.netlab.hosts)
        _ = self.trace  # checked as it is loaded

    @property
    def trace(self) -> Trace | None:
        """The trace of the emulated accelerator; None on a real one."""
        if self.compute == REAL:
            return None
        if not self.compute.startswith(EMULATE):
            known = f"compute is {REAL}, or {EMULATE} and a trace, as in {EMULATE}resnet50@0.1"
            raise ValueError(f"{known}; got {self.compute!r}")
        return load_trace(self.compute.removeprefix(EMULATE))

    @property
    def slowed_link(self) -> str | None:
        """The emulated link, as slow as the dilation makes it."""
        return f"{parse_rate(self.link) * BITS_PER_BYTE / self.dilate:.0f}bit" if self.link else None

    @property
    def slowed_netlab(self) -> NetlabConfig:
        """The lab, its links as slow as the dilation makes them."""
        return self.netlab.dilated(self.dilate)

    def labels(self) -> list[str]:
        """Return the labels of figures that do not come from a real accelerator and network."""
        trace = self.trace
        computed = [f"emulated compute {trace.name}, {trace.seconds:.3g} s per step"] if trace else []
        dilated = [f"dilated {self.dilate:g}"] if self.dilate != 1 else []
        return [*computed, *dilated, *netlab.labels(self.link)]
