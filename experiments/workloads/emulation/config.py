"""Options of every command that measures steps on a real or an emulated accelerator and network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...network import lab as netlab
from ...network.lab import NetlabConfig, backend_here
from ...network.link import check_link
from ...network.ranks_config import RanksConfig
from .options import check_dilation, chosen_trace, dilated, labels
from .trace import Trace


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
