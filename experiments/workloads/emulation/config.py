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
    """real, or emulate:TRACE for the layers of a trace instead of the model, taking its time"""
    dilate: float = 1.0
    """what the times of a trace are multiplied by, and the rates of link and netlab divided by"""
    link: str | None = None
    """rate of an emulated link for every rank, such as 100mbit"""

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
