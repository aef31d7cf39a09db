"""A report of the last steps, and its line for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...compress import WarmUp

MILLI, MEGA, BITS = 1e3, 1e6, 8


@dataclass(frozen=True)
class Report:
    """The means of the last steps on this rank, by flat names, after `step` of them.

    `advice`: what to do, once. `warm_up`: the one under way.
    """

    step: int
    compressor: str
    metrics: Mapping[str, float]
    advice: str | None = None
    warm_up: WarmUp | None = None

    def __str__(self) -> str:
        warming = "" if self.warm_up is None else str(self.warm_up)
        parts = (f"step {self.step}", warming, self._split(), self._buckets(), *self._bytes(), self._feedback())
        return " | ".join(filter(None, parts))

    def _split(self) -> str:
        """Return the milliseconds of a step in words, split into their parts."""
        found = self.metrics
        if "step_seconds" not in found:
            return ""
        parts = self._milliseconds("compute", "exposed")
        return f"{found['step_seconds'] * MILLI:.1f} ms" + (f": {parts}" if parts else "")

    def _buckets(self) -> str:
        """Return the milliseconds of all buckets, which wait side by side: their sum may be longer than the step."""
        parts = self._milliseconds("encode", "wait", "decode")
        return f"sum of buckets: {parts}" if parts and "step_seconds" in self.metrics else ""

    def _milliseconds(self, *names: str) -> str:
        found = ((name, self.metrics.get(f"{name}_seconds")) for name in names)
        return ", ".join(f"{name} {seconds * MILLI:.1f}" for name, seconds in found if seconds is not None)

    def _bytes(self) -> Iterator[str]:
        """Yield what was sent; of hybrid sharding, among shards and between replicas."""
        if "replica_sent_bytes" not in self.metrics:
            yield self._sent("", "")
            return
        yield self._sent("", " among shards")
        yield self._sent("replica_", " between replicas")

    def _sent(self, prefix: str, where: str) -> str:
        found = self.metrics
        if f"{prefix}sent_bytes" not in found:
            return ""
        from rich.filesize import decimal  # not with gradwire itself

        sent, ratio = found[f"{prefix}sent_bytes"], found.get(f"{prefix}ratio")
        parts = [f"sent {decimal(round(sent))}{where}"]
        parts += [f"{ratio:.1f}x fewer bytes"] if sent and ratio is not None else []
        if rate := found.get(f"{prefix}link_bytes_per_second"):
            megabits = rate * BITS / MEGA
            parts.append(f"at {megabits:.0f} Mbit/s" if megabits >= 1000 else f"at {megabits:.3g} Mbit/s")
        return ", ".join(parts)

    def _feedback(self) -> str:
        found = self.metrics
        if "cosine" not in found:
            return ""
        norms = f"gradient {found['gradient_norm']:.3g}, residual {found['residual_norm']:.3g}"
        return f"{norms} ({found['residual_ratio']:.2f}x), cosine {found['cosine']:.2f}"
