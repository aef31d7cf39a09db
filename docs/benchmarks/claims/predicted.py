"""Claims of predicted steps, by the one function of `advise`, `plan` and the pages."""

from collections.abc import Iterator, Sequence
from functools import cache

from predicted_steps import Situation, situations

from claims.claim import PREDICTED, Claim, Source, times

COMMAND = "python docs/benchmarks/predicted_steps.py"


@cache
def predicted() -> tuple[Situation, ...]:
    """Return the situations, with predictions for each compressor."""
    return tuple(situations())


def name_of(each: Situation, compressor: str) -> str:
    """Return the name of the claim of a compressor's speed-up over bf16."""
    network = "box" if each.network is None else f"{each.network:g} Gbit/s"
    return f"step {compressor} {each.hosts} x {each.gpus_per_host} {network}, {each.micro_batches} micro-batches"


def between(values: Sequence[float]) -> str:
    """Return seconds, least and most."""
    texts = dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values)))
    return " to ".join(texts) + " s"


def claims() -> Iterator[Claim]:
    """Yield the speed-up of a step over bf16 and over none, least and most, of each compressor in each situation."""
    for each in predicted():
        source = Source("docs/benchmarks/predicted_steps.py", COMMAND, f"{each.gpu}, computed", each.model)
        for name in each.steps:
            compute = lambda each=each, name=name: each.speed_up(name)  # noqa: E731
            yield Claim(name_of(each, name), PREDICTED, source, compute, times)
            over_none = lambda each=each, name=name: each.speed_up(name, "none")  # noqa: E731
            yield Claim(f"{name_of(each, name)} over none", PREDICTED, source, over_none, times)
            if each.network is None:
                seconds = [prediction.step for prediction in each.steps[name]]
                yield Claim(f"box {name}", PREDICTED, source, lambda seconds=seconds: seconds, between)
