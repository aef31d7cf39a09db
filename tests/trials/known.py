"""What is known to fail, and why; such trials are left out, but for one that is asked for by its seed."""

from .draw import SETTLED


def named(trial, name):
    """The steps before which an event of this name happens."""
    return [number for number, step in enumerate(trial.steps) for event, _ in step.events if event == name]


def saved_after_a_swap(trial):
    """A state that is saved between a swap and the next step has no buckets to bring along."""
    return bool(
        set(named(trial, "swap")) & {step for how in ("resume", "deepcopy", "pickle") for step in named(trial, how)}
    )


def first_buckets(trial):
    """torch's first buckets, which a resumed model starts with, may lie across those that were saved."""
    lists = "bucket_cap_mb_list" in trial.options
    late = "static_graph" in trial.options and SETTLED in named(trial, "resume")
    return not trial.ours and bool(named(trial, "resume")) and (lists or late)


def static_numbers(trial):
    """In the first step of a static graph torch gives all its buckets the number 0, and none is the last."""
    return not trial.ours and "static_graph" in trial.options and trial.mishap is None


def skipping_and_joining(trial):
    """torch hands out gradients that no rank had, where it skips unused parameters inside join."""
    return not trial.ours and bool(trial.inputs) and "skip_all_reduce_unused_params" in trial.options


def swapped_while_skipping(trial):
    """State of buckets that are not sent any more has no home when a swap comes, and none after it."""
    return "skip_all_reduce_unused_params" in trial.options and bool(named(trial, "swap") or named(trial, "rescale"))


KNOWN = (saved_after_a_swap, first_buckets, static_numbers, skipping_and_joining, swapped_while_skipping)


def why(trial):
    """What is known of a trial's failure; empty where nothing is."""
    return next((each.__doc__ for each in KNOWN if each(trial)), "")
