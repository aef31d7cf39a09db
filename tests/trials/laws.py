"""What has to be true of a trial, judged from the answers of all its ranks."""

from itertools import zip_longest

import torch

from .draw import PLAIN
from .gradients import in_memory_order, near, same
from .models import Headed
from .simulated import Simulated, simulates

HALF = {"fp16": 4e-3, "bf16": 4e-2}  # what 16 bits may take away, relative to the largest number
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
LOSSY = 1e-5
LOSES = ("error_feedback=false", "error_feedback=0", "momentum=", "dgc", "hosts")  # or has its account elsewhere


def broken(trial, answers):
    found = list(differences(trial, answers))
    ledger, simulated = Ledger(trial), Simulated(trial) if simulates(trial) else None
    for number, notes in enumerate(zip_longest(*(answer.steps for answer in answers))):
        present = [note for note in notes if note is not None]
        found += [f"step {number}: {each}" for each in step_laws(present)]
        found += [f"step {number}: {each}" for each in overflowed(trial, number, present)]
        found += [f"step {number}: {each}" for each in ledger.step(number, present)]
        found += [f"step {number}: {each}" for each in simulated.step(number, present)] if simulated else []
    found += [f"at the end: {each}" for each in ledger.settled([answer.held for answer in answers])]
    return found


def differences(trial, answers):
    """Ranks end with the same parameters."""
    for name, first in answers[0].parameters.items():
        if any(not equal(first, answer.parameters[name]) for answer in answers[1:]):
            yield f"ranks end with other parameters: {name}"


def equal(left, right):
    """The same bits, NaN for NaN."""
    return torch.equal(left.nan_to_num(1e30), right.nan_to_num(1e30))


def step_laws(notes):
    """Ranks get the same bits, a NaN of one is everybody's, copies go on alike."""
    for name, first in notes[0].got.items():
        if any(not bits(first, note.got[name]) for note in notes[1:]):
            yield f"ranks got other bits of {name}"
    infinite = any(g is not None and not g.isfinite().all() for note in notes for g in note.given.values())
    if infinite and any(note.finite for note in notes):
        yield "what is not finite on one rank did not reach all"
    for rank, note in enumerate(notes):
        if note.differing:
            yield f"rank {rank}: {', '.join(note.differing)} got something else"


def overflowed(trial, number, notes):
    """What should overflow on a rank did."""
    rank = trial.steps[number].overflow
    if rank is None or trial.inputs:
        return
    if all(each is None or each.isfinite().all() for each in notes[rank].given.values()):
        yield f"no gradient of rank {rank} overflowed, as it should"


def bits(left, right):
    """As `equal`, for gradients that may be None."""
    return left is right if left is None or right is None else equal(left, right)


class Ledger:
    """What was given and not handed out, by parameter, in float64: it has to be what ranks hold back."""

    def __init__(self, trial):
        self.trial, self.spec = trial, trial.spec
        self.lossless = True  # as long as nothing is dropped
        self.count = 1
        parameters = Headed(trial.parts, trial.seed).named_parameters()
        self.due = {name: in_memory_order(p, p).double() * 0 for name, p in parameters if p.requires_grad}
        self.largest = 1.0
        self.used = set()

    def step(self, number, notes):
        """Count a step; sentences where it gave what it should not."""
        for name, argument in self.trial.steps[number].events if not self.trial.inputs else ():
            self.event(name, argument)
        self.lossless = self.lossless and not any(option in self.spec for option in LOSES)
        ranks = self.trial.world_size if self.trial.weighted or not self.trial.inputs else len(notes)
        if not all(note.finite for note in notes):
            return
        self.count += 1
        for name in self.due:
            yield from self.gradient(name, notes, ranks)
        if self.trial.inputs and not self.trial.weighted and not self.exact:
            self.lossless = False  # averages of some ranks are made larger
        if all(note.held is not None for note in notes) and not self.trial.inputs:
            yield from self.settled([note.held for note in notes])

    def event(self, name, argument):
        if name == "swap":
            self.spec = argument
        if name == "rescale":
            self.due = {name: numbers * argument for name, numbers in self.due.items()}
            self.largest *= max(1.0, argument)  # what rounding took before is scaled, too

    @property
    def exact(self):
        """Whether each average is the mean by itself."""
        return self.spec in PLAIN and not any(name == "swap" for step in self.trial.steps for name, _ in step.events)

    def gradient(self, name, notes, ranks):
        got, given = notes[0].got[name], [note.given[name] for note in notes if note.given[name] is not None]
        if not any(name in note.used for note in notes):
            if not same(notes[0].before[name], got, 0.0):
                yield f"{name}, which no rank used, got another gradient"
            return
        if got is None:
            yield f"{name}, which a rank used, got no gradient"
            return
        self.used.add(name)
        mean = sum(numbers.double() for numbers in given) / ranks
        self.largest = max(self.largest, float(mean.abs().max()) if mean.numel() else 0.0)
        self.due[name] += mean - got.double()
        if self.exact and not near(mean, got, EXACT[got.dtype]):
            yield f"{name} is off by {float((mean - got.double()).abs().max()):.2g}"

    def settled(self, held):
        """Nothing is lost: what is due is what is held back."""
        if self.exact or not self.lossless:
            return
        for name, due in self.due.items():
            if "static_graph" in self.trial.options and name not in self.used:
                continue  # it never gets a gradient: what a method makes of zeros for it goes nowhere
            total = torch.zeros_like(due)
            for rank in held:
                for first, numbers in rank.get(name, ()):
                    total[first : first + len(numbers)] += numbers / len(held)
            off = float((total - due).abs().max()) if due.numel() else 0.0
            if off > self.tolerance:
                yield f"{name}: {off:.2g} of gradient was lost, or made up"

    @property
    def tolerance(self):
        specs = [self.trial.spec, *(arg for step in self.trial.steps for name, arg in step.events if name == "swap")]
        narrow = [
            loss for spec in specs for half, loss in HALF.items() if half in spec.removeprefix("topk:k=5,value_dtype=")
        ]
        rough = HALF["bf16"] if "Brief" in self.trial.parts else LOSSY
        return self.count * self.largest * max([rough, *narrow])
