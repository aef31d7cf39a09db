"""How much of each link is used, every 10 ms (figures 8 and 9 of Jayarajan et al. 2019 show it for their method)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..link import BITS_PER_BYTE

INTERVAL = 0.01  # seconds between two counts
BITS_PER_MBIT = 10**6
VISIBLE = 0.01  # of the highest rate


@dataclass(frozen=True)
class Utilization:
    """Bytes over the links of a lab, as counted since its start.

    `seconds`: when each count was taken, since the first. `links`: by host, `sent_bytes` and `received_bytes`, one total
    for each of these times, Ethernet headers included. `began`: the first count, in seconds since 1970.
    """

    network: str
    rate: str
    began: float
    seconds: list[float] = field(default_factory=list)
    links: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write JSON."""
        document = {"kind": "utilization", "interval_seconds": INTERVAL, **vars(self)}
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Utilization:
        """What `write` wrote. Raises ValueError for another file."""
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("kind", None) != "utilization":
            raise ValueError(f"{path} is no file of --utilization")
        del document["interval_seconds"]
        return cls(**document)

    def rates(self, host: int, name: str) -> list[float]:
        """Mbit/s between each two counts."""
        counts, seconds = self.links[str(host)][name], self.seconds
        return [
            (counts[i] - counts[i - 1]) * BITS_PER_BYTE / BITS_PER_MBIT / (seconds[i] - seconds[i - 1])
            for i in range(1, len(seconds))
        ]

    def busy(self, host: int) -> tuple[float, float]:
        """From the first traffic that can be seen in a picture to the last; everything where nothing was sent."""
        seen, seconds = self.rates(host, "sent_bytes"), self.seconds
        visible = [i for i, rate in enumerate(seen) if rate > VISIBLE * max(seen)]
        return (seconds[visible[0]], seconds[visible[-1] + 1]) if visible else (0.0, max(seconds[-1], INTERVAL))
