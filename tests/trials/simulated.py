"""What the simulator makes of the gradients that the ranks gave, bucket by bucket."""

import torch

from gradwire.compress import Ranks, Simulation, compressor
from gradwire.compress.protocol.layout import working_dtype
from gradwire.compress.state import tree as states
from gradwire.ddp_core import layout_of

from .gradients import in_memory_order, near
from .models import SPARSE, Headed

OTHER_ORDER = 1e-4  # what sums in another order may make, on more than two ranks


def simulates(trial):
    """Whether buckets alone decide what ranks get: each gradient is given as it is, to one compressor."""
    if trial.world_size > 2 and "16" in trial.spec:
        return False  # sums in another order round to other numbers of 16 bits
    events = {name for step in trial.steps for name, _ in step.events}
    return not (trial.inputs or trial.dynamic or SPARSE & set(trial.parts) or events & {"swap", "rescale"})


def hand_over(before, after, owed, number):
    """New buckets remember what those before do; what has lost its place is owed, by rank. `number`: of the step."""
    saved = [{} for _ in owed]
    for simulation in before:
        for entries, state in zip(saved, simulation.states, strict=True):
            entries.update(states.save(state))
    for simulation in after:
        for entries, state, lost in zip(saved, simulation.states, owed, strict=True):
            states.set_step(state, number)
            mine = {name: entries[name] for name in simulation.layouts[0].names if name in entries}
            lost.update(states.load(state, mine))


class Simulated:
    """The same training, in the simulator. Its state follows the parameters by name when buckets change."""

    def __init__(self, trial):
        self.trial = trial
        self.parameters = dict(Headed(trial.parts, trial.seed).named_parameters())
        self.buckets = {}
        self.owed = [{} for _ in range(trial.world_size)]  # what has lost its place when buckets changed, by rank

    def step(self, number, notes):
        """Sentences where the ranks got something else."""
        self.arrange(notes[0].buckets, number)
        after = {names: each.copy() for names, each in self.buckets.items()}
        for names, simulation in after.items():
            flats, layout = [], simulation.layouts[0]
            for note, owed, state in zip(notes, self.owed, simulation.states, strict=True):
                exact = torch.cat([self.given(note, name, owed) for name in names])
                flats.append(exact.to(layout.dtype))
                if owed and exact.dtype != layout.dtype:  # what 16 bits cannot hold of the sum stays held back
                    states.Leaves(state).hold(layout, exact - flats[-1])
            expected = layout.views(simulation.step(flats)[0])
            for name in names if notes[0].finite else ():
                got = notes[0].got[name]  # None where no rank used it
                if got is not None and not self.agrees(expected[name].reshape(-1), got):
                    yield f"{name} is not what the simulator says"
        if notes[0].finite:
            self.buckets, self.owed = after, [{} for _ in notes]
        for state in (state for simulation in self.buckets.values() for state in simulation.states):
            states.set_step(state, number + 1)  # those count that overflow, too

    def given(self, note, name, owed):
        """What a rank is to send for a parameter, wide: zeros where it has no gradient."""
        gradient = note.given[name]
        if gradient is None:
            parameter = self.parameters[name]
            gradient = in_memory_order(parameter, torch.zeros_like(parameter))
        return gradient.to(working_dtype(gradient.dtype)) + owed.get(name, 0.0)

    def arrange(self, buckets, number):
        """Have these buckets, with what the ones before remember."""
        if set(buckets) == set(self.buckets):
            return
        before, self.buckets = self.buckets, {names: self.made(names) for names in buckets}
        hand_over(before.values(), self.buckets.values(), self.owed, number)

    def made(self, names):
        members = {name: self.parameters[name] for name in names}
        dtype = self.parameters[names[0]].dtype.to_real()
        return Simulation(
            compressor(self.trial.spec), layout_of(members, dtype, torch.device("cpu"), Ranks(self.trial.world_size))
        )

    def agrees(self, expected, got):
        if self.trial.world_size == 2:
            return torch.equal(expected, got)
        return near(got, expected, 0.1 if got.dtype == torch.bfloat16 else OTHER_ORDER)
