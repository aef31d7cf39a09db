"""Trials of `gradwire.overlap`: whatever is sent, read and waited for when, the bits are those without overlap."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import gradwire

from ..ddp_core.nets import Batch
from ..ddp_core.overlap.overlapped import equal
from . import draw, models
from .models import Headed, loss_of
from .rank import environment

SPECS = (
    "none",
    "none",
    "bf16",
    "int8",
    "topk:ratio=0.2",
    "onebit:block=8,error_feedback=1",
    "powersgd:rank=1",
    "fp16:start_iter=2",
)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
}
LATE, WAITED = 0.3, 0.05  # seconds that a rank is late, and that others then wait for at the least
PLACES = ("cleared", "forward", "backward", "step")  # after which a rank may wait for all, or look at a parameter


@dataclass(frozen=True)
class Step:
    """`events`: (name, argument) before it. `waits`, `looks`: places of each rank. `early`: clears before its forward."""

    events: tuple[tuple[str, object], ...]
    micro_batches: int
    to_none: bool
    early: bool
    clip: bool
    pauses: tuple[float, ...]
    waits: tuple[tuple[str, ...], ...]
    looks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Trial:
    """A training with an overlapped optimizer. `breaks`: whether an error in the last backward ends it."""

    seed: int
    world_size: int
    parts: tuple[str, ...]
    spec: str
    optimizer: str
    slice_mb: float
    shared_memory: bool
    steps: tuple[Step, ...]
    breaks: bool
    options: dict[str, object] = field(default_factory=dict)


def drawn(seed):
    source = Random(f"overlap {seed}")
    parts, options = draw.model_and_options(source, ours=True)
    single = "static_graph" in options
    if not single:  # other models with parts that are not used are synchronous
        options = {name: value for name, value in options.items() if name.startswith(("bucket", "gradient"))}
    synchronous = models.SPARSE if single else models.LEAVES_OUT | models.NEVER_USES | models.SPARSE
    parts = tuple(part for part in parts if part not in synchronous)
    world_size = source.choice((2, 2, 3))
    optimizer = source.choice(list(OPTIMIZERS))
    steps = [step(source, number, world_size, single) for number in range(source.randint(4, 9))]
    late = source.randrange(2, len(steps) - 1)
    steps[late - 1] = replace(steps[late - 1], events=())  # nothing overlaps right behind new buckets
    steps[late : late + 2] = with_a_late_average(*steps[late : late + 2], source.randrange(world_size))
    spec, slice_mb = source.choice(SPECS), source.choice((0.0002, 0.0005, 0.002, 1.0))
    shared_memory, breaks = source.random() < 0.6, source.random() < 0.15
    return Trial(seed, world_size, parts, spec, optimizer, slice_mb, shared_memory, tuple(steps), breaks, options)


def with_a_late_average(before, after, slow):
    """Two steps of a model, not its first two, between which nobody waits: a rank is late, and others begin the second."""
    pauses = tuple(LATE if rank == slow else 0.0 for rank in range(len(before.pauses)))
    nothing = ((),) * len(pauses)
    return (
        replace(before, events=(), clip=False, pauses=pauses, waits=nothing, looks=nothing),
        replace(after, events=(), waits=nothing, looks=nothing),
    )


def step(source, number, world_size, single):

    def of_ranks(chance):
        return tuple(tuple(place for place in PLACES if source.random() < chance) for _ in range(world_size))

    chosen = source.sample(list(EVENTS), k=source.choice((0, 0, 1, 2))) if number > 1 else []
    return Step(
        tuple((name, source.choice(SPECS) if name == "swap" else None) for name in chosen),
        1 if single else source.choice((1, 1, 1, 2)),
        source.random() < 0.7,
        source.random() < 0.5,
        source.random() < 0.2,
        tuple(source.choice((0.0, 0.0, 0.0, 0.02)) for _ in range(world_size)),
        of_ranks(source.choice((0.0, 0.1))),
        of_ranks(source.choice((0.0, 0.15))),
    )


class Broken(Exception):
    """A user's own error."""


class Training:
    """One training of a trial, on this rank."""

    def __init__(self, trial, rank, order):
        self.trial, self.rank, self.order, self.spec = trial, rank, order, trial.spec
        self.overlapped = order != "synchronous"
        self.noted, self.waited = [], 0.0
        self.raises = {"forward": False, "backward": False}
        self.make(Headed(trial.parts, trial.seed))

    def make(self, network):
        self.model = gradwire.DistributedDataParallel(network, compressor=self.spec, **self.trial.options)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[self.trial.optimizer](trained)
        self.optimizer = gradwire.overlap(self.model, optimizer, order=self.order, slice_mb=self.trial.slice_mb)
        network.last.register_forward_pre_hook(lambda *_: self.fail("forward"))
        network.first.weight.register_hook(lambda _: self.fail("backward"))

    def fail(self, place):
        if self.raises[place]:
            raise Broken(place)

    def run(self):
        """All steps; what was noted of them, and of the end."""
        for number, plan in enumerate(self.trial.steps):
            for name, argument in plan.events:
                EVENTS[name](self, argument)
            self.step(number, plan)
        if self.trial.breaks:
            self.break_backward()
        self.noted.append([parameter.detach().clone() for parameter in self.model.parameters()])
        self.noted.append(self.numbers_of_the_optimizer())
        self.model.compression.close()
        return self.noted

    def numbers_of_the_optimizer(self):
        state = self.optimizer.state_dict()["state"]
        fields = [state[index][name] for index in sorted(state) for name in sorted(state[index])]
        return [each.clone() for each in fields if isinstance(each, torch.Tensor)]

    def step(self, number, plan):
        """As a user writes it; this rank waits and looks where it was drawn."""
        if plan.early:
            self.clear(plan)
        self.passed("cleared", plan)
        for micro_batch in range(plan.micro_batches):
            last = micro_batch == plan.micro_batches - 1
            with nullcontext() if last else self.model.no_sync():
                loss = loss_of(self.forward(Batch.drawn(self.rank, number, micro_batch)), True)
                self.passed("forward", plan)
                if self.overlapped:
                    time.sleep(plan.pauses[self.rank])
                loss.backward()
            self.noted.append(loss.detach())
        self.passed("backward", plan)
        if plan.clip:
            self.noted.append(clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.5))
        self.optimizer.step()
        self.passed("step", plan)
        if not plan.early:
            self.clear(plan)

    def forward(self, batch):
        """The model's, noting how long it waits for averages that it finds under way."""
        began, overlap = time.perf_counter(), self.model._overlap
        outputs = self.model(batch)
        waits = (update.waited for update in overlap._updates if update.needed > began)
        self.waited = max(self.waited, sum(waits))
        return outputs

    def clear(self, plan):
        whose = self.optimizer if self.trial.seed % 2 else self.model
        whose.zero_grad(set_to_none=plan.to_none)

    def passed(self, place, plan):
        """A place where this rank may wait, or look at a parameter and its gradient."""
        if place in plan.looks[self.rank]:
            trained = list(self.model.parameters())
            chosen = trained[(self.trial.seed + len(self.noted)) % len(trained)]
            self.noted.append([chosen.detach().clone(), None if chosen.grad is None else chosen.grad.clone()])
        if place in plan.waits[self.rank]:
            self.optimizer.drain()

    def swap(self, spec):
        self.model.compression.swap(spec)
        self.spec = spec

    def resume(self, _):
        """A new model, optimizer and overlap, which go on from a checkpoint."""
        saved = self.model.module.state_dict(), self.optimizer.state_dict(), self.model.compression.state_dict()
        network, optimizer, compression = ({**each} for each in saved)
        fresh = Headed(self.trial.parts, self.trial.seed)
        fresh.load_state_dict(network)
        self.model.compression.close()
        self.make(fresh)
        self.optimizer.load_state_dict(optimizer)
        self.model.compression.load_state_dict(compression)

    def evaluate(self, _):
        with torch.no_grad():
            self.noted.append(self.model(Batch.drawn(self.rank, -1, 0))["main"].clone())

    def discard(self, _):
        self.noted.append(self.model(Batch.drawn(self.rank, -2, 0))["main"].detach().clone())

    def rate(self, _):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.7

    def decay(self, _):
        """Another weight decay, in place, right after the step."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01

    def state(self, _):
        self.noted.append(self.numbers_of_the_optimizer())

    def raise_in_forward(self, _):
        """An error of the user's in forward, after which training goes on."""
        self.raises["forward"] = True
        with pytest.raises(Broken):
            self.model(Batch.drawn(self.rank, -3, 0))
        self.raises["forward"] = False

    def break_backward(self):
        """An error of the user's in backward: each parameter is as before, and the next forward says what to do."""
        loss = loss_of(self.model(Batch.drawn(self.rank, -4, 0)), True)
        self.raises["backward"] = True
        with pytest.raises(Broken):
            loss.backward()
        self.raises["backward"] = False


EVENTS = {
    "swap": Training.swap,
    "resume": Training.resume,
    "evaluate": Training.evaluate,
    "discard": Training.discard,
    "raise": Training.raise_in_forward,
    "rate": Training.rate,
    "decay": Training.decay,
    "state": Training.state,
}


def comparable(note):
    """A note in which NaN is equal to itself."""
    if isinstance(note, list):
        return [comparable(each) for each in note]
    if note is None:
        return None
    return (torch.view_as_real(note) if note.is_complex() else note).nan_to_num(1e30)


def train(rank, world_size, trial):
    """Where the overlapped training on this rank, and the one without, differ, in words; seconds of its longest wait."""
    with environment(trial):
        expected = Training(trial, rank, "synchronous").run()
        overlapped = Training(trial, rank, "priority")
        found = overlapped.run()
    if len(expected) != len(found):
        return f"{len(found)} notes in place of {len(expected)}", overlapped.waited
    pairs = enumerate(zip(expected, found, strict=True))
    differing = [f"note {place}" for place, pair in pairs if not equal(*map(comparable, pair))]
    return ", ".join(differing), overlapped.waited


def broken(trial, answers):
    """Sentences on all ranks that differ, and where no forward has found an average under way."""
    found = [f"rank {rank}: not as without overlap: {said}" for rank, (said, _) in enumerate(answers) if said]
    late = any(waited > WAITED for _, waited in answers)
    return found if late else [*found, "no average came after the next forward had begun"]
