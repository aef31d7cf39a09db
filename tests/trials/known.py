"""What is known to fail, and why; such trials are left out, but for one that is asked for by its seed."""

from .draw import SETTLED, Trial


def named(trial, name):
    """The steps before which an event of this name happens."""
    return [number for number, step in enumerate(trial.steps) for event, _ in step.events if event == name]


def first_buckets(trial):
    """torch's first buckets, which a resumed model starts with, may lie across those that were saved."""
    lists = "bucket_cap_mb_list" in trial.options
    late = "static_graph" in trial.options and SETTLED in named(trial, "resume")
    return not trial.ours and bool(named(trial, "resume")) and (lists or late)


def joining_unused(trial):
    """torch hands out zeros for parameters that no rank used, inside join."""
    return not trial.ours and bool(trial.inputs) and trial.dynamic


def copied_gaps(trial):
    """A copy of a parameter with gaps between its numbers has none, and products with it round another way."""
    return "Gaps" in trial.parts and bool(named(trial, "deepcopy"))


def discarded_before_no_sync(trial):
    """After a forward whose outputs are dropped the next backward is synchronized, also inside no_sync; as in torch."""
    return any(trial.steps[number].micro_batches > 1 for number in named(trial, "discard"))


def stepping_on_after_a_raise(trial):
    """After an error in forward one rank's next step meets the others' last one in torch's own collectives: Gloo aborts."""
    mishap = trial.mishap
    raised = mishap is not None and (mishap.kind, mishap.place) == ("raise", "forward")
    return not trial.ours and raised and trial.dynamic


def summed_elsewhere(trial):
    """After a swap to plain sums buckets stay where they are; those of a new model lie in shared memory, summed in order."""
    new = [name for kind in ("resume", "deepcopy", "pickle", "rewrap") for name in named(trial, kind)]
    return trial.ours and trial.shared_memory and trial.world_size > 2 and swaps_to_sums(trial) and bool(new)


def summed_in_other_buckets(trial):
    """torch makes buckets of a static graph anew once; in those of a model that was resumed Gloo adds in another order.

    A copy of a model under torch's DDP, without gradwire, in float64, then differs by 7e-18 on four ranks, and not on two.
    """
    resumed = bool(named(trial, "resume")) and "static_graph" in trial.options
    return not trial.ours and resumed and trial.world_size > 2 and swaps_to_sums(trial)


def swaps_to_sums(trial):
    """Whether compression ends in some step."""
    return any((event, spec) == ("swap", "none") for step in trial.steps for event, spec in step.events)


def joined_without_inputs(trial):
    """A static graph of torch's, with a rank that has no inputs at all: its collectives do not match the others'."""
    return not trial.ours and "static_graph" in trial.options and 0 in trial.inputs


def skipped_on_some_ranks(trial):
    """torch's DDP may hang, as it says, where it skips what is unused and ranks use different parameters."""
    mixed = "Conditional" in trial.parts or any(len(set(step.both)) > 1 for step in trial.steps)
    return not trial.ours and "skip_all_reduce_unused_params" in trial.options and mixed


KNOWN = (
    skipped_on_some_ranks,
    joined_without_inputs,
    summed_elsewhere,
    summed_in_other_buckets,
    stepping_on_after_a_raise,
    discarded_before_no_sync,
    copied_gaps,
    first_buckets,
    joining_unused,
)


def why(trial):
    """What is known of a trial's failure; empty where nothing is."""
    if not isinstance(trial, Trial):
        return ""
    return next((each.__doc__ for each in KNOWN if each(trial)), "")
