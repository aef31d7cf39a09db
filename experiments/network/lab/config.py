"""Options of a lab, and its effect on the process group and on results."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...ranks.launchers import lab_here
from ..link import parse_rate, shown_rate

MOST_HOSTS = 99


@dataclass(frozen=True)
class NetlabConfig:
    """Emulated hosts, each behind a link of its own, which its ranks share."""

    hosts: int = 0
    """number of emulated hosts, each a network namespace with its own link (Linux, root); 0 emulates none"""
    rate: str = "0"
    """bandwidth of each host's link, such as 100mbit or 1gbit; 0 sets no limit"""
    utilization: str | None = None
    """write the bytes on each link, every 10 ms, to this JSON file, and a picture next to it"""
    ranks_per_host: int = 1
    """number of ranks on each emulated host, which share its link"""

    def __post_init__(self) -> None:
        if not 0 <= self.hosts <= MOST_HOSTS:
            raise ValueError(f"hosts are 0 to {MOST_HOSTS}, got {self.hosts}")
        if not 1 <= self.ranks_per_host <= MOST_HOSTS:
            raise ValueError(f"ranks_per_host is 1 to {MOST_HOSTS}, got {self.ranks_per_host}")
        parse_rate(self.rate)

    @property
    def described(self) -> str:
        """In words: `4 hosts at 100 Mbit/s`, `2 hosts of 4 ranks at 1 Gbit/s`."""
        hosts = f"{self.hosts} hosts " + (f"of {self.ranks_per_host} ranks " if self.ranks_per_host > 1 else "")
        return hosts + (f"at {shown_rate(self.rate)}" if parse_rate(self.rate) else "without limits")


def check_lab(lab: NetlabConfig) -> None:
    """Raise ValueError for what is set of a lab that has no hosts."""
    if lab.hosts:
        return
    given = [field.name for field in fields(NetlabConfig) if getattr(lab, field.name) != field.default]
    if given:
        names = " and ".join(f"netlab.{name}" for name in given)
        raise ValueError(f"{names} without hosts, and so without a lab: add --netlab.hosts 4, or leave it out")


def backend_here(wanted: str, link: str | None = None, hosts: int = 0) -> str:
    """The process group to ask for in place of `wanted`: Gloo or gloo-cuda on a host of a lab and behind an emulated link.

    `hosts` are those of a lab to come. Raises ValueError where NCCL is wanted and a lab or a link is there.
    """
    lab = lab_here() is not None or hosts > 0
    if wanted == "nccl" and (lab or link):
        why = (
            "the hosts of a lab share this host's GPUs, and NCCL goes past their links"
            if lab
            else "an emulated link delays Gloo's collectives, not NCCL's"
        )
        raise ValueError(f"{why}: use --backend gloo, or gloo-cuda, with which ranks share GPUs")
    return "gloo" if (lab or link) and wanted == "auto" else wanted


def labels(link: str | None = None) -> list[str]:
    """Return the labels of results measured on an emulated network; none for a real one.

    `link` is the rate of an emulated link (`gradwire.experiments.network.link`).
    """
    lab = lab_here()
    return [*([f"netlab: {lab}"] if lab else []), *([f"emulated link {shown_rate(link)}"] if link else [])]
