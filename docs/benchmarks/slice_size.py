"""Steps by replay with today's default slices, against slices of 2 MiB on the wire: `python slice_size.py 0.05 1 20`.

For each latency of a collective, in ms: how many of 1,008 cases (six traces, eight methods, 2, 4 and 16 hosts, 10 Mbit/s to
10 Gbit/s) are shorter and longer by more than 3 %. Once with collectives that wait for each other's latency, as planning has
it; then with two of each round under way, as with Gloo, and with eight.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradwire.ddp_core.measure.link_schedule import arrivals, priority_order, step_seconds
from gradwire.ddp_core.measure.step_model import LinkCost, StepModel
from gradwire.experiments.advice.shared_cores import Work
from gradwire.experiments.advice.simulated_step import NOTHING, Parcel, Pipeline, Round
from gradwire.experiments.workloads.emulation import load_trace, step_by_slices

TRACES = ("gpt-20m", "resnet18-cifar", "inceptionv3", "resnet50", "sockeye", "vgg19")
METHODS = ("none", "bf16", "int8", "int4", "int2", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
HOSTS, RATES = (2, 4, 16), (0.01, 0.03, 0.1, 0.3, 1, 3, 10)  # Gbit/s
UNDER_WAY = (1, 2, 8)
BEFORE = 2.0  # MiB on the wire
SLOW = 0.1  # Gbit/s
MORE = 1.03


def seconds(model: StepModel, order: Sequence[int], rounds: int, alpha: float, under_way: int) -> float:
    """Of a step: a lane a round, on each of which so many may be under way, and one link, first come, first served."""
    pieces = [model.pieces[index] for index in order]
    parcels = (
        Parcel(piece.ready, piece.needed, NOTHING, (Round(NOTHING, Work(piece.wire / rounds), alpha),) * rounds)
        for piece in pieces
    )
    step = Pipeline(Work(model.forward), Work(model.backward), tuple(parcels), cores=1.0, under_way=under_way)
    return step.seconds(until_needed=True)


def ratios(alpha: float, under_way: int) -> Iterator[tuple[float, float]]:
    """The rate, and the step with today's default over that with slices of 2 MiB, of each case."""
    for name, method, hosts, rate in itertools.product(TRACES, METHODS, HOSTS, RATES):
        trace, link = load_trace(name), LinkCost(0.0, 8 / (rate * 1e9))
        rounds = round(max(piece.wire for piece in step_by_slices(trace, method, hosts, LinkCost(1.0, 0.0)).pieces))
        found = []
        for size in (None, BEFORE):
            model = step_by_slices(trace, method, hosts, link, slice_mb=size)
            held = (replace(piece, wire=piece.wire + alpha * rounds) for piece in model.pieces)
            waiting = replace(model, pieces=tuple(held))
            order = priority_order(waiting)
            if under_way == 1:
                found.append(step_seconds(waiting, arrivals(waiting, order)))
            else:
                found.append(seconds(model, order, rounds, alpha, under_way))
        yield rate, found[0] / found[1]


for latency, count in itertools.product(map(float, sys.argv[1:]), UNDER_WAY):
    cases = list(ratios(latency / 1000, count))
    for most in (SLOW, max(RATES)):
        steps = sorted(ratio for rate, ratio in cases if rate <= most)
        shorter, longer = sum(each < 2 - MORE for each in steps), sum(each > MORE for each in steps)
        found = f"{shorter} shorter, {longer} longer, times {steps[0]:.2f} to {steps[-1]:.2f}"
        print(f"{latency:g} ms, {count} under way, up to {most:g} Gbit/s: of {len(steps)} {found}", flush=True)
