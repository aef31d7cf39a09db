"""The recommendation: choices, ranked, in sentences, tables and lines to paste."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .candidates import BACKWARD, MUON, TWO_LEVELS, uncertainty
from .predict import Measured
from .rule import Choice, Rule

MILLI, MEGA = 1e3, 1e6
LAUNCH = "torchrun --nnodes {hosts} --nproc-per-node {per_host} --rdzv-backend c10d --rdzv-endpoint HOST:29400 train.py"
ASSUMED = (
    "hosts and links like these. No rank waits for slower ones, and nothing else uses the network.\n"
    "Bandwidth as measured, and latency for each message that follows another in a ring (Gloo) or tree (NCCL)."
)


ON_ONE_HOST = (
    "No verdict: all ranks share the CPUs of this host, where steps show nothing of a network. Start the same command on "
    "each of your hosts."
)
LOW_RANK = " That is of trainings of 120 to 400 steps: PowerSGD falls further behind the longer a training is."


@dataclass(frozen=True)
class Forecast:
    """The choices on a number of ranks.

    Attributes:
        ranks: the number of ranks.
        per_host: the number of ranks on each host.
        choices: the choices, the fastest first.
        best: the recommended choice.
        beyond: the next step; None if no other choice is worth it.
        wide_only: True if choices of fewer than 8 bits were left out.
    """

    ranks: int
    per_host: int
    choices: tuple[Choice, ...]
    best: Choice
    beyond: Choice | None = None
    wide_only: bool = False

    @classmethod
    def ranked(cls, ranks: int, per_host: int, choices: Iterable[Choice], rule: Rule) -> Forecast:
        """Return the forecast of choices, given in any order."""
        ordered = tuple(sorted(choices, key=lambda choice: choice.step))
        return cls(ranks, per_host, ordered, *rule.chosen(ordered), rule.wide_only)

    def tried(self, choice: Choice, seconds: float, rule: Rule) -> Forecast:
        """After one of the choices took so many seconds a step."""
        others = (each for each in self.choices if each is not choice)
        return self.ranked(self.ranks, self.per_host, (*others, replace(choice, tried=seconds)), rule)

    @property
    def rows(self) -> set[tuple[str, str]]:
        """Compressor and order of each choice."""
        return {(choice.spec, choice.order) for choice in self.choices}

    def only(self, rows: Container[tuple[str, str]], rule: Rule) -> Forecast:
        """Without the choices of other compressors and orders."""
        kept = (choice for choice in self.choices if (choice.spec, choice.order) in rows)
        return self.ranked(self.ranks, self.per_host, kept, rule)

    def of_tried(self, rule: Rule) -> Forecast:
        """Recommends one that was tried, or none: an untried one may only look better."""
        tried = [choice for choice in self.choices if choice.tried is not None or choice.is_none]
        if self.best.tried is not None or not any(choice.tried for choice in tried):
            return self
        best, beyond = rule.chosen(tried)
        return replace(self, best=best, beyond=beyond)

    def of(self, spec: str, order: str = BACKWARD) -> Choice:
        """One of the choices. Raises KeyError where it is none."""
        for choice in self.choices:
            if (choice.spec, choice.order) == (spec, order):
                return choice
        raise KeyError(f"{spec} in the order {order} is none of {', '.join(each.name for each in self.choices)}")

    def speed_up(self, choice: Choice) -> float:
        """The speed-up of a choice over none: of measured steps if the choice was tried, else of predicted ones."""
        none = self.of("none")
        return none.prediction.step / choice.prediction.step if choice.tried is None else none.step / choice.tried

    @property
    def gain(self) -> float:
        """The speed-up of the recommended step over the fastest step that gives nothing up."""
        return self.speed_up(self.best) / max(self.speed_up(choice) for choice in self.choices if choice.free)

    @property
    def sentence(self) -> str:
        """The recommendation."""
        best, none = self.best, self.of("none")
        if best.is_none:
            words = f"Do not compress here. Keep your script: none takes {_ms(none.step)} per step{self._beside}."
            return words + self._next * (self.beyond is not None)
        if best.spec == none.spec and self.beyond is None:
            both = f"{best.name} takes {_ms(best.step)} per step, and none {self._seconds(none)}"
            return f"Do not compress; overlap alone pays: {both}."
        if best.free:
            words = f"Use {best.name}: it takes {_ms(best.step)} per step, and none {self._seconds(none)}."
            return words + self._next
        return (
            f"Use {best.name}: {_ms(best.step)} per step, a speed-up of {none.step / best.step:.2f}x over none "
            f"({self._seconds(none)}){self._over_bf16}, at an expected validation loss "
            f"of {_percent(best.loss)}.{LOW_RANK if 'powersgd' in best.spec else ''}{self._next}"
        )

    @property
    def _over_bf16(self) -> str:
        """The clause of the gain over what gives nothing up, where that is more than none."""
        there = any("bf16" in choice.spec for choice in self.choices)  # not where gradients have 16 bits
        return f" and {self.gain:.2f}x over the faster of none and bf16" if there else ""

    @property
    def _beside(self) -> str:
        """The time of the fastest compressor that was tried, in words, where none is recommended."""
        tried = [choice for choice in self.choices if choice.tried is not None and choice.spec != "none"]
        return (
            f", and {tried[0].name}, the fastest of the others that were tried, {_ms(tried[0].step)}" if tried else ""
        )

    @property
    def _next(self) -> str:
        """The sentence about the next step, which has fewer bits and may cost loss."""
        if self.wide_only and not self.best.free:
            return " Stop there: with Muon, 4 bits cost loss."
        if self.beyond is None:
            return " Compressing more does not pay here."
        step, loss = self._seconds(self.beyond), _percent(self.beyond.loss)
        low_rank = LOW_RANK * ("powersgd" in self.beyond.spec)
        faster = self.best.step / self.beyond.step
        return f" Next step: {self.beyond.name} takes {step}, {faster:.2f}x faster, at an expected loss of {loss}.{low_rank}"

    def to_paste(self) -> Iterator[str]:
        """Yield the lines of a script and the command that trains with the recommended choice, to be run on each host."""
        hosts = self.ranks // self.per_host
        yield f"on {hosts:,} hosts of {self.per_host} ranks, where HOST is the first one:"
        yield from (f"    {line}" for line in self.best.line.splitlines())
        yield "    " + LAUNCH.format(hosts=hosts, per_host=self.per_host)

    def _seconds(self, choice: Choice) -> str:
        """Return the time of a choice's step in words, marked as predicted if only other choices were tried."""
        mixed = choice.tried is None and any(each.tried for each in self.choices)
        return f"{_ms(choice.step)} as predicted" if mixed else _ms(choice.step)


@dataclass(frozen=True)
class Advice:
    """The findings of `advise`. Printing them shows all.

    Attributes:
        measured: measurements of the model and the network.
        here: the choices on these ranks, the fastest first.
        elsewhere: the choices on other numbers of hosts.
        family: the kind of optimizer whose expected losses were used.
        seconds: duration of `advise`.
        failures: errors of trials.
        left_out: the compressors that need more memory than there is, and how much.
        on_cpus_of_one_host: True if all ranks share the CPUs of a host, without an emulated link.
    """

    measured: Measured
    here: Forecast
    elsewhere: tuple[Forecast, ...] = ()
    family: str = ""
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    on_cpus_of_one_host: bool = False

    @property
    def recommended(self) -> Choice:
        """The recommended choice on these ranks."""
        return self.here.best

    @property
    def line(self) -> str:
        """The line of code to paste."""
        return self.recommended.line

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        computation, ranks = self.measured.computation, self.measured.ranks
        yield (
            f"computation {_ms(computation.seconds)} per step: forward {_ms(computation.forward.seconds)}, backward "
            f"{_ms(computation.backward.seconds)}, optimizer {_ms(computation.optimizer.seconds)}"
        )
        for (form, dtype, scope), cost in self.measured.costs.items():
            among = {"all": f"{ranks.world_size} ranks", "host": "a host", "across": f"{ranks.hosts} hosts"}[scope]
            rate = f"{8 / cost.link.beta / 1e9:.3g} Gbit/s per rank" if cost.link.beta else "no limit seen"
            kind = f"{form.__name__} of {str(dtype).removeprefix('torch.')}"
            yield f"network: {kind} among {among}: {rate}, {_ms(cost.link.alpha)} per round"
        yield ""
        yield from table(self.here)
        yield "step: predicted; tried: measured by training a copy, and used instead of the prediction"
        yield f"loss: expected validation loss above that of none, with {self.family}; ? did not run with a model this large"
        yield from self._largest()
        yield uncertainty()
        yield from (f"failed when tried: {failure}" for failure in self.failures)
        yield from (f"left out: {each}" for each in self.left_out)
        yield ""
        if self.on_cpus_of_one_host:
            yield ON_ONE_HOST
            return
        yield self.here.sentence + ("" if self.recommended.tried else " Predicted, not tried.")
        if not self.recommended.is_none:
            yield from (f"    {line}" for line in self.line.splitlines())
        if self.family == MUON and not self.recommended.is_none:
            yield "Here optimizer is the list of both: [muon, adamw]."
        if self.family in self.recommended.candidate.warm_up:
            yield "A warm-up lowers the loss: add start_iter=N,warmup=int8 with N a tenth to a quarter of your steps."
        if self.elsewhere:
            yield ""
            yield from sizes(self.elsewhere)
            for each in self.elsewhere:
                yield from ("", *each.to_paste())

    def _largest(self) -> Iterator[str]:
        """Yield the sizes of the largest models behind losses that are expected of any size."""
        shown = {each.spec.removeprefix(TWO_LEVELS): each.candidate for each in self.here.choices}
        sizes = {
            spec: each.largest[self.family] / MEGA
            for spec, each in shown.items()
            if each.any_size and self.family in each.largest
        }
        if sizes:
            yield "largest model measured: " + ", ".join(f"{spec} {size:.3g} M" for spec, size in sizes.items())


def table(forecast: Forecast) -> Iterator[str]:
    """Yield the lines of a table of all choices, the fastest first."""
    yield from _columns(
        ("compressor", "order", "step", "tried", "speed-up", "bound", "sent", "state", "peak", "loss"),
        [
            (
                choice.spec,
                choice.order,
                _ms(choice.prediction.step),
                "" if choice.tried is None else _ms(choice.tried),
                f"{forecast.speed_up(choice):.2f}x",
                _ms(choice.prediction.bound),
                megabytes(choice.prediction.sent_bytes),
                *map(megabytes, choice.memory),
                _percent(choice.loss),
            )
            for choice in forecast.choices
        ],
        left=2,
    )


def sizes(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """Yield the lines of a table of recommendations on other numbers of hosts."""
    rows = []
    for each in forecasts:
        best, place = each.best, f"{each.ranks // each.per_host:,}"
        if each.per_host > 1:
            place += f" of {each.per_host} ranks"
        steps = (_ms(each.of("none").step), _ms(best.step), f"{each.of('none').step / best.step:.2f}x")
        rows.append((place, best.spec, best.order, *steps))
    yield from _columns(("hosts", "recommended", "order", "none", "step", "speed-up"), rows, left=3)
    yield f"assumed: {ASSUMED}"


def _columns(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """A table of text; the first `left` columns to the left."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, ["-" * width for width in widths], *rows):
        cells = (
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * MILLI:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def megabytes(count: float) -> str:
    """Return bytes in words."""
    return f"{count / MEGA:.3g} MB" if count < 1000 * MEGA else f"{count / MEGA / 1000:.3g} GB"


def _percent(part: float | None) -> str:
    return "?" if part is None else f"{part:+.1%}"
