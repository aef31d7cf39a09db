"""What a trial is, and how one is drawn from its seed alone."""

from dataclasses import dataclass, field, replace
from random import Random

from . import models

SPECS = (
    "none",
    "bf16",
    "fp16:start_iter=2",
    "topk:ratio=0.2",
    "topk:k=5,value_dtype=fp16",
    "topk:ratio=0.1,error_feedback=false",
    "onebit:error_feedback=1",
    "int4:block=8,start_iter=2,warmup=int8",
    "powersgd:rank=1",
    "powersgd:rank=2,payload=int4,start_iter=2,warmup=int8",
    "powersgd:rank=1,start_iter=3,warmup=bf16",
    "powersgd:rank=2,warm_start=false",
    "batched-powersgd:rank=1",
    "fp16+powersgd:rank=1",
    "bf16+batched-powersgd:rank=2",
    "acp-powersgd:rank=1",
    "randomk:ratio=0.2,block=8,error_feedback=1",
    "chunktopk:ratio=0.2,chunk=8,error_feedback=1",
)
ON_HOSTS = (
    "hosts:ranks=2+none",
    "hosts:ranks=2+none",
    "hosts:ranks=2+topk:ratio=0.2",
    "hosts:ranks=2+onebit:block=8",
    "hosts:ranks=2+powersgd:rank=1",
    "hosts:ranks=2+powersgd:rank=2,start_iter=2",
    "hosts:ranks=2+int8",
    "hosts:ranks=2+bf16",
    "hosts:ranks=2+topk:ratio=0.3,error_feedback=0.8",
    "hosts:ranks=4+onebit",
    "onebit:error_feedback=1",
    "none",
)
WITH_OPTIONS = (
    "topk:ratio=0.2,error_feedback=0.7",
    "topk:ratio=0.2,momentum=0.9,error_feedback=0.9",
    "topk:ratio=0.3,error_feedback=0.8,momentum=0.9",
    "onebit:block=8,error_feedback=0.7",
    "onebit:block=8,start_iter=2,error_feedback=1",
    "powersgd:rank=1,momentum=0.5",
    "powersgd:rank=2,error_feedback=0.9,start_iter=1",
    "int4:block=8,error_feedback=0.8",
    "int8:block=8,error_feedback=true",
    "ternary:block=8,momentum=0.5,error_feedback=0.5",
    "dgc:ratio=0.2,momentum=0.9",
    "bf16+powersgd:rank=1",
    "none",
)
PLAIN = frozenset({"none", "hosts:ranks=2+none", "hosts:ranks=4+onebit"})  # the mean, but for rounding
CAPS = ({}, {"bucket_cap_mb": 0.0005}, {"bucket_cap_mb": 0.002}, {"bucket_cap_mb_list": [0.0002, 0.001]})
SECOND_ROUND = ("powersgd", "onebit", "int4")  # of requests
SETTLED = 2  # steps until a state brings the buckets along that its model goes on with
REBUILT = 1  # the step in which buckets are made anew, for the order in which gradients got ready
PLACES = ("construction", "forward", "backward", "late backward", "rebuild", "save", "swap", "first request", "request")
KINDS = ("kill", "raise", "hang", "stop")
ALONE = ("lone swap", "lone load")  # what one rank does and the others do not
MORE = ("throw", "fork", "damaged")  # events that change nothing
LIMIT = 3.0  # seconds that waits take in trials of failures
SHORT, LONG = 0.2, 2.5  # times the limit


@dataclass(frozen=True)
class Step:
    """`events`: (name, argument) before it. `zero`: none, zeros or keep. `pauses`: of each rank. `both`: see `loss_of`."""

    events: tuple[tuple[str, object], ...] = ()
    micro_batches: int = 1
    zero: str = "none"
    clip: bool = False
    overflow: int | None = None  # the rank
    pauses: tuple[float, ...] = ()
    both: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Mishap:
    """What befalls a rank, and where. `seconds`: that it hangs or is stopped. `request`: (round, turn)."""

    kind: str
    place: str
    rank: int
    step: int
    seconds: float
    request: tuple[int, int]

    @property
    def harmless(self):
        """Whether the others can wait for it."""
        return self.kind in ("hang", "stop") and self.seconds < LIMIT


@dataclass(frozen=True)
class Trial:
    """`ours`: which DistributedDataParallel. `groups`: none stands for the default one. `inputs`: steps of each rank."""

    seed: int
    world_size: int
    ours: bool
    parts: tuple[str, ...]
    spec: str
    steps: tuple[Step, ...]
    options: dict[str, object] = field(default_factory=dict)
    groups: int = 0
    shared_memory: bool = True
    inputs: tuple[int, ...] = ()
    weighted: bool = True  # divide_by_initial_world_size
    mishap: Mishap | None = None

    @property
    def dynamic(self):
        """Whether steps may leave parameters out."""
        return bool(self.options.get("find_unused_parameters"))


def drawn(seed, faults=0.2):
    source = Random(seed)
    if source.random() < faults:
        return failing(source, seed)
    return training(source, seed)


def on_hosts(seed):
    """A trial of hosts of two ranks."""
    return training(Random(f"hosts {seed}"), seed, sizes=(4,), specs=ON_HOSTS)


def with_feedback_options(seed):
    """A trial of what may be done with residuals; momentum is for steps that use all parameters."""
    trial = training(Random(f"options {seed}"), seed, specs=WITH_OPTIONS)
    if not trial.dynamic:
        return trial
    steps = tuple(
        replace(each, events=tuple((name, without_momentum(argument)) for name, argument in each.events))
        for each in trial.steps
    )
    return replace(trial, spec=without_momentum(trial.spec), steps=steps)


def without_momentum(spec):
    """Another specification in place of one with momentum."""
    return "int4:block=8,error_feedback=0.8" if isinstance(spec, str) and "momentum" in spec else spec


def training(source, seed, sizes=(2, 2, 3), specs=SPECS):
    """A trial in which nothing fails."""
    world_size, ours, spec = source.choice(sizes), source.random() < 0.65, source.choice(specs)
    parts, options = model_and_options(source, ours)
    joins = source.random() < 0.15
    drawn_steps = tuple(
        step(source, number, ours, world_size, parts, options) for number in range(source.randint(3, 8))
    )
    trial = {
        "shared_memory": source.random() < 0.6,
        "groups": source.choice((0, 0, 1, 3)) if ours else source.choice((0, 0, 1)),
        "weighted": source.random() < 0.5 or not ours,  # refused where a hook averages
    }
    if joins:
        trial["inputs"] = tuple(source.randint(0, len(drawn_steps)) for _ in range(world_size))
        return Trial(seed, world_size, ours, parts, spec, drawn_steps, options, **trial)
    several = with_events(source, drawn_steps, ours, trial["groups"], specs)
    several = with_more(Random(f"{seed} more"), several, spec)
    return Trial(seed, world_size, ours, parts, spec, several, options, **trial)


def model_and_options(source, ours):
    """Parts, and options under which they can be trained."""
    rule = source.choice(("", "", "find_unused_parameters", "find_unused_parameters", "static_graph"))
    refused = set() if ours else models.SPARSE
    refused |= models.REENTRANT if rule == "find_unused_parameters" else models.LEAVES_OUT
    refused |= set() if rule else models.NEVER_USES
    parts = tuple(source.choices([name for name in models.PARTS if name not in refused], k=source.randint(1, 5)))
    options = {**source.choice(CAPS), "gradient_as_bucket_view": source.random() < 0.5}
    if rule:
        options[rule] = True
    if rule == "find_unused_parameters" and source.random() < 0.3:
        options["skip_all_reduce_unused_params"] = True
    return parts, options


def step(source, number, ours, world_size, parts, options):
    """A step without events; what torch itself gets wrong is left out."""
    dynamic, static = "find_unused_parameters" in options, "static_graph" in options
    single = static or (not ours and "skip_all_reduce_unused_params" in options)
    overflows = source.random() < 0.1
    both = [source.random() < 0.7 for _ in range(world_size)] if dynamic else [True] * world_size
    return Step(
        (),
        1 if single else source.choice((1, 1, 1, 2, 3)),
        source.choice(clearings(ours, dynamic, parts)) if number else "none",
        source.random() < 0.3,
        source.randrange(world_size) if overflows else None,
        tuple(source.choice((0.0, 0.0, 0.0, 0.0, 0.03)) for _ in range(world_size)),
        tuple(both),
    )


def clearings(ours, dynamic, parts):
    """How gradients may be cleared: a hook on torch's takes old ones of unused parameters for new ones."""
    if models.SPARSE & set(parts):
        return ("none",)
    return ("none", "zeros", "keep") if ours or not dynamic else ("none", "zeros")


def with_events(source, steps, ours, groups, specs):
    """The same steps, with events before some of them."""
    copies = ("deepcopy", "pickle") if ours and not groups else ()
    late = ("resume", *copies, *(["rewrap"] if ours else []), "swap", "rescale", "look", "look")
    result = []
    for number, each in enumerate(steps):
        names = late if number >= SETTLED else ("swap", "look")
        chosen = source.sample(names, k=source.choice((0, 0, 1, 2)))
        events = tuple((name, argument(source, name, specs)) for name in sorted(chosen, key=late_ones_last))
        events += tuple((name, None) for name in ("read", "evaluate", "discard") if source.random() < 0.15)
        result.append(Step(events, *(getattr(each, f) for f in list(Step.__dataclass_fields__)[1:])))
    return tuple(result)


def with_more(source, steps, spec):
    """The same steps, with events between some of them that must change nothing. What is thrown away counts as a step."""
    specs = [spec, *(argument for step in steps for name, argument in step.events if name == "swap")]
    counted = any("start_iter" in each or "warm_start" in each for each in specs)
    names = [name for name in MORE if name != "throw" or not counted]
    result = []
    for number, each in enumerate(steps):
        chosen = [name for name in names if source.random() < 0.12 and number > SETTLED]
        events = (*each.events, *((name, None) for name in chosen))
        result.append(replace(each, events=events))
    return tuple(result)


def late_ones_last(name):
    """A state that was just loaded cannot be rescaled, nor one that was loaded and swapped be saved."""
    return ("rescale", "swap").index(name) if name in ("rescale", "swap") else 2


def argument(source, name, specs):
    drawn_by = {"swap": lambda: source.choice(specs), "rescale": lambda: source.choice((0.5, 2.0, 8.0))}
    return drawn_by.get(name, lambda: None)()


def made_request(spec, number, turn):
    """A (round, turn) that a training of six steps comes to: few compressors have a second round, some from step 3 on."""
    return (number, min(turn, 2)) if number and any(name in spec for name in SECOND_ROUND) else (0, turn)


def failing(source, seed):
    """A trial with one mishap; nothing else is out of the ordinary."""
    world_size, ours, spec = source.choice((2, 3, 3)), source.random() < 0.75, source.choice(SPECS)
    parts, options = model_and_options(source, ours)
    steps = tuple(Step(pauses=(0.0,) * world_size, both=(True,) * world_size) for _ in range(6))
    more = Random(f"{seed} alone")  # of its own, so that what was drawn before stays
    alone = more.random() < 0.15
    mishap = Mishap(
        source.choice(KINDS),
        source.choice(PLACES),
        source.randrange(world_size),
        source.randint(0, 3),
        LIMIT * source.choice((SHORT, LONG, LONG)),
        (source.choice((0, 0, 1)), source.randint(0, 5)),
    )
    shared = source.random() < 0.6
    if mishap.place == "request":
        mishap = replace(mishap, request=made_request(spec, *mishap.request))
    if mishap.place == "rebuild":
        mishap = replace(mishap, step=REBUILT)
    if alone:
        mishap = Mishap(more.choice(ALONE), "alone", mishap.rank, more.randint(SETTLED, 4), 0.0, mishap.request)
    return Trial(seed, world_size, ours, parts, spec, steps, options, 1, shared, mishap=mishap)
