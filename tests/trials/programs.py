"""Trials of compressors in the simulator: rebuilt buckets, rows without gradients, numbers of any size."""

import dataclasses
from dataclasses import dataclass
from random import Random

import torch

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.compress.state import tree as states

from .simulated import hand_over

ROUGH = 1e-5  # what sums in float32 may take away in a step, relative to the largest number
SPECS = (
    "topk:ratio=0.2",
    "onebit:block=64,error_feedback=1",
    "int8:block=8,error_feedback=true",
    "int4:rotate=true",
    "int2",
    "int8:rotate=true,error_feedback=true",
    "terngrad:error_feedback=true",
    "powersgd:rank=2,min_compression_rate=0",
    "powersgd:rank=1,payload=int4,min_compression_rate=0",
    "powersgd:rank=1,payload=int4,start_iter=2,warmup=int8",
    "batched-powersgd:rank=1",
    "acp-powersgd:rank=2,min_compression_rate=0",
    "randomk:ratio=0.2,block=8,error_feedback=1",
    "chunktopk:ratio=0.2,chunk=8,error_feedback=1",
    "dropping:ratio=0.1,cap=0.2",
    "adacomp:bin=8,cap=0.3",
    "adaptive:ladder=int8/int4/onebit",
    "none",
)
SHAPES = ((3,), (17,), (8, 6), (24, 3), (5, 1), (2, 33), (16, 4, 2), (40,), (1, 9))
LARGE = (16, 4, 2)  # of which each compressor holds something back
SIZES = (1e-30, 1.0, 1e30)


@dataclass(frozen=True)
class Step:
    """`order`: indices of the parameters in each bucket, where these are made anew. `bad`: see `hidden`."""

    order: tuple[tuple[int, ...], ...] | None
    bad: tuple[int, int, float, float] | None  # (rank, element of a bucket, value, size of the others)


@dataclass(frozen=True)
class Trial:
    """`never`: parameters that get no gradient. `unused`: rows of others that get none."""

    seed: int
    spec: str
    hosts: int
    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    never: tuple[int, ...]
    unused: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]


def drawn(seed):
    source = Random(f"programs {seed}")
    hosts, world_size = source.choice(((1, 1), (1, 2), (1, 3), (2, 4), (2, 6), (3, 6), (4, 8)))
    shapes = (LARGE, *source.choices(SHAPES, k=source.randint(0, 5)))
    rows = [(place, row) for place, shape in enumerate(shapes) if len(shape) > 1 for row in range(shape[0])]
    never = tuple(place for place in range(1, len(shapes)) if source.random() < 0.2)
    unused = tuple(each for each in rows if source.random() < 0.3)
    steps = [Step(order(source, len(shapes)), None)]
    for _ in range(source.randint(3, 5)):
        bad = (source.randrange(world_size), source.randrange(10**6), source.choice((torch.inf, -torch.inf, torch.nan)))
        anew = order(source, len(shapes)) if source.random() < 0.4 else None
        steps.append(Step(anew, (*bad, source.choice(SIZES)) if source.random() < 0.4 else None))
    bad = source.randrange(world_size), source.randrange(10**6), torch.nan, source.choice(SIZES)
    last = steps.pop()  # by then each compressor holds something back
    steps.append(Step(last.order or order(source, len(shapes)), last.bad or bad))
    return Trial(seed, source.choice(SPECS), hosts, world_size, shapes, never, unused, tuple(steps))


def order(source, count):
    """Parameters dealt into buckets."""
    places = source.sample(range(count), count)
    cuts = sorted(source.sample(range(1, count), source.randint(0, min(3, count - 1))))
    return tuple(tuple(places[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True))


class Model:
    """The buckets of a trial, on all ranks."""

    def __init__(self, trial):
        self.trial = trial
        self.built = compressor(f"hosts+{trial.spec}" if trial.hosts > 1 else trial.spec)
        names = tuple(f"p{place}" for place in range(len(trial.shapes)))
        device = torch.device("cpu")
        self.whole = Layout(names, trial.shapes, torch.float32, device, Ranks(trial.world_size, per_host=trial.hosts))
        self.buckets, self.owed = [], [{} for _ in range(trial.world_size)]

    def arrange(self, order, number):
        """Make buckets anew, with what the old ones remember."""
        before, self.buckets = self.buckets, [Simulation(self.built, self.whole.select(places)) for places in order]
        hand_over(before, self.buckets, self.owed, number)

    def held(self):
        """What all ranks hold back and owe, on average, flat, in float64."""
        found = [states.held_back(state) for simulation in self.buckets for state in simulation.states]
        total = torch.zeros(self.whole.numel, dtype=torch.float64)
        for entries in (*found, *self.owed):
            for name, numbers in entries.items():
                self.whole.views(total)[name].view(-1).add_(numbers.double() / self.trial.world_size)
        return total

    def zeroed(self, flat):
        """Zeros where no rank has a gradient."""
        views = self.whole.views(flat)
        for place in self.trial.never:
            views[f"p{place}"].zero_()
        for place, row in self.trial.unused:
            views[f"p{place}"][row] = 0
        return flat


def undergone(pool, trial, scale):
    model, generator, found = Model(trial), torch.Generator().manual_seed(trial.seed), []
    anew = bad = False
    for number, step in enumerate(trial.steps):
        before = model.held()
        if step.order is not None:
            model.arrange(step.order, number)
            anew |= number > 0 and (trial.spec == "none" or bool(before.any()))
            if (lost := float((model.held() - before).abs().max())) > ROUGH * max(1.0, float(before.abs().max())):
                found.append(f"step {number}: new buckets lost {lost:.2g}")
        random = (torch.randn(model.whole.numel, generator=generator) for _ in range(trial.world_size))
        given = [model.zeroed(numbers) for numbers in random]
        if step.bad is not None:
            bad = True
            found += [f"step {number}: {each}" for each in hidden(model, given, step.bad)]
        found += [f"step {number}: {each}" for each in unlawful(model, given)]
    found += [] if anew else ["no buckets were made anew with what others held back"]
    found += [] if bad else ["no number was bad"]
    return found, []


def hidden(model, given, bad):
    """An element that is not finite shows in the average of its bucket, whatever the size of the others."""
    rank, place, value, size = bad
    for simulation in model.buckets:
        flats = [flat * size for flat in bucket_of(model, simulation, given)]
        flats[rank][place % flats[rank].numel()] = value
        outputs = simulation.copy().step(flats)
        if any(output.isfinite().all() for output in outputs):
            yield f"{value} beside numbers of {size} did not show"


def bucket_of(model, simulation, given):
    layout = simulation.layouts[0]
    for flat in given:
        views = model.whole.views(flat)
        yield torch.cat([views[name].reshape(-1) for name in layout.names])


def unlawful(model, given):
    """A step conserves, gives all ranks the same bits, and makes nothing of zeros."""
    due = model.held() + sum(flat.double() for flat in given) / len(given)
    given = [flat.clone() for flat in given]
    for flat, owed in zip(given, model.owed, strict=True):
        for name, numbers in owed.items():
            model.whole.views(flat)[name].view(-1).add_(numbers)
    model.owed = [{} for _ in given]
    average = torch.zeros(model.whole.numel)
    for simulation in model.buckets:
        outputs = simulation.step(list(bucket_of(model, simulation, given)))
        if not all(torch.equal(output, outputs[0]) for output in outputs):
            yield "ranks got other bits"
        for name, view in dataclasses.replace(simulation.layouts[0]).views(outputs[0]).items():
            model.whole.views(average)[name].copy_(view)
    held = model.held()
    if (off := float((due - average.double() - held).abs().max())) > ROUGH * max(1.0, float(due.abs().max())):
        yield f"{off:.2g} of gradient was lost, or made up"
    for what, numbers in (("average", average), ("held back", held)):
        if not torch.equal(model.zeroed(numbers.clone()), numbers):
            yield f"rows that no rank used are not zero: {what}"
