"""A report of the last steps, and its line for people."""

from __future__ import annotations

from collections.abc import Mapping
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
        return " | ".join(filter(None, (f"step {self.step}", warming, self._split(), self._bytes(), self._feedback())))

    def _split(self) -> str:
        """Return the milliseconds of a step in words, split into their parts."""
        found = self.metrics
        if "step_seconds" not in found:
            return ""
        parts = [self._milliseconds(name) for name in ("compute", "exposed") if f"{name}_seconds" in found]
        beside = [self._milliseconds(name) for name in ("encode", "wait", "decode") if f"{name}_seconds" in found]
        whole = f"{found['step_seconds'] * MILLI:.1f} ms"
        split = f": {', '.join(parts)}" if parts else ""
        return whole + split + (f" ({', '.join(beside)})" if beside else "")

    def _milliseconds(self, name: str) -> str:
        return f"{name} {self.metrics[f'{name}_seconds'] * MILLI:.1f}"

    def _bytes(self) -> str:
        found = self.metrics
        if "sent_bytes" not in found:
            return ""
        from rich.filesize import decimal  # not with gradwire itself

        parts = [f"sent {decimal(round(found['sent_bytes']))}"]
        parts += [f"{found['ratio']:.4g}x fewer bytes"] if "ratio" in found else []
        if rate := found.get("link_bytes_per_second"):
            megabits = rate * BITS / MEGA
            parts.append(f"at {megabits:.0f} Mbit/s" if megabits >= 1000 else f"at {megabits:.3g} Mbit/s")
        return ", ".join(parts)

    def _feedback(self) -> str:
        found = self.metrics
        if "cosine" not in found:
            return ""
        norms = f"gradient {found['gradient_norm']:.3g}, residual {found['residual_norm']:.3g}"
        return f"{norms} ({found['residual_ratio']:.2f}x), cosine {found['cosine']:.2f}"
