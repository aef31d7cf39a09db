"""Options of a lab, and its effect on the process group and on results."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from ...ranks.launchers import lab_here
from ..link import BITS_PER_BYTE, NUMBER, parse_rate, shown_rate

MOST_HOSTS = 99
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class NetlabConfig:
    """Emulated hosts, each behind a link of its own, which its ranks share."""

    hosts: int = 0
    """number of emulated hosts, each a network namespace with its own link (Linux, root); 0 emulates none"""
    rate: str = "0"
    """bandwidth of each host's link, such as 100mbit or 1gbit; 0 sets no limit"""
    down: str | None = None
    """bandwidth towards each host, such as 500mbit; that of rate if not given"""
    delay: str = "0"
    """latency of each host's link in each direction, such as 30ms; a round trip between two hosts takes it four times"""
    jitter: str = "0"
    """largest random addition to the delay of a packet, such as 5ms; packets keep their order"""
    loss: str = "0"
    """share of the packets that each host's link loses in each direction, such as 0.1%"""
    utilization: str | None = None
    """write the bytes on each link, every 10 ms, to this JSON file, and a picture next to it"""
    ranks_per_host: int = 1
    """number of ranks on each emulated host, which share its link"""

    def __post_init__(self) -> None:
        if not 0 <= self.hosts <= MOST_HOSTS:
            raise ValueError(f"hosts are 0 to {MOST_HOSTS}, got {self.hosts}")
        if not 1 <= self.ranks_per_host <= MOST_HOSTS:
            raise ValueError(f"ranks_per_host is 1 to {MOST_HOSTS}, got {self.ranks_per_host}")
        _ = self.described  # checked as it is written

    @property
    def described(self) -> str:
        """In words: `4 hosts at 100 Mbit/s`, `2 hosts of 4 ranks at 10 Mbit/s up and 50 Mbit/s down, delay 30 ms`."""
        hosts = f"{self.hosts} hosts " + (f"of {self.ranks_per_host} ranks " if self.ranks_per_host > 1 else "")
        up, down = (shown_rate(rate) if parse_rate(rate) else "no limit" for rate in (self.rate, self.rate_down))
        rates = f"at {up}" if up == down else f"at {up} up and {down} down"
        delays = {"delay": parse_time(self.delay), "jitter": parse_time(self.jitter)}
        shown = [f", {name} {1000 * seconds:g} ms" for name, seconds in delays.items() if seconds]
        lost = [f", loss {100 * loss:g} %"] if (loss := parse_share(self.loss)) else []
        return "".join([hosts, "without limits" if up == down == "no limit" else rates, *shown, *lost])

    @property
    def rate_down(self) -> str:
        """The bandwidth towards each host."""
        return self.rate if self.down is None else self.down

    @property
    def slower(self) -> float:
        """Bytes per second of the direction with less bandwidth; 0 if neither has a limit."""
        return min(filter(None, map(parse_rate, (self.rate, self.rate_down))), default=0.0)

    def dilated(self, factor: float) -> NetlabConfig:
        """Return this network with its bandwidths divided, and its times multiplied, by a factor."""
        rate, down = (f"{parse_rate(each) * BITS_PER_BYTE / factor:.0f}bit" for each in (self.rate, self.rate_down))
        delay, jitter = (f"{1e6 * parse_time(each) * factor:.0f}us" for each in (self.delay, self.jitter))
        return replace(self, rate=rate, down=None if self.down is None else down, delay=delay, jitter=jitter)


def parse_time(text: str) -> float:
    """Return the seconds of a time such as 30ms; 0 needs no unit. Raises ValueError for another text.

    >>> parse_time("30ms"), parse_time("500 us"), parse_time("1.5s"), parse_time("0")
    (0.03, 0.0005, 1.5, 0.0)
    """
    match = re.fullmatch(NUMBER + r" ?(?P<unit>us|ms|s)", text.strip())
    if match is None and text.strip() != "0":
        raise ValueError(f"a delay or jitter is a number and a unit, us, ms or s, such as 30ms; got {text!r}")
    return 0.0 if match is None else float(match["number"]) * SECONDS[match["unit"]]


def parse_share(text: str) -> float:
    """Return the share that a text in percent means, below 1; 0 needs no unit. Raises ValueError for another text.

    >>> parse_share("0.5%"), parse_share("0")
    (0.005, 0.0)
    """
    match = re.fullmatch(NUMBER + " ?%", text.strip())
    share = float(match["number"]) / 100 if match else 0.0
    if share >= 1 or (match is None and text.strip() != "0"):
        raise ValueError(f"a loss is a percentage from 0% to below 100%, such as 0.1%; got {text!r}")
    return share


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
