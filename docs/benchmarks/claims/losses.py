"""Claims of validation losses: how far each compressor ends above no compression, at the largest size where it ran."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean
from typing import Any

from claims.claim import MEASURED, Claim, Source, loss, only, per_cent, raw, study_rows, times, whole_per_cent
from gradwire.experiments.advice.candidates import ADAMW, CANDIDATES, MUON, OPTIMIZERS, SGD

H200, RANKS = "one H200", "4 simulated ranks on two CPU cores"
QUALITY = "python docs/benchmarks/gpu_quality.py"
GPT2, SMALL, FEWER = (f"docs/benchmarks/h200/quality-{name}.jsonl" for name in ("gpt2", "small", "fewer-bytes"))
STUDY = "docs/results/time-to-accuracy-gpt/points.jsonl"
TABLE, FEEDBACK, WARM_UP = (f"docs/results/loss/{name}.json" for name in ("losses", "feedback", "warm-up"))
EXAMPLES, FINE_TUNED, SHARDED = (f"docs/results/examples/{name}.jsonl" for name in ("pretrain", "finetune", "fsdp"))
FEW_BITS, LONG_RUNS = (f"docs/results/{name}/runs.json" for name in ("few-bits-muon", "hundredfold"))
AS_ATTACH = {  # names under which today's compressor ran, by optimizer
    ("int4", ADAMW): ["int4:error_feedback=false"],
    ("int4", MUON): ["int4:error_feedback=true"],
    ("int4:core=4", MUON): ["int4, core 4"],  # the same averages, to the bit
    ("int4:core=4", ADAMW): ["int4, core 4, no error feedback"],
    ("int4", SGD): ["int4:error_feedback=true"],
    ("int2", ADAMW): ["int2:error_feedback=false"],
    ("int2", MUON): ["int2:error_feedback=true"],
    ("int8", ADAMW): ["int8:error_feedback=false"],
    ("int8", MUON): ["int8:error_feedback=false"],
}
COLD = "from the first step"
LARGER = "0.9 M"  # the largest model of the long trainings on simulated sites
ENOUGH = 3  # seeds: the table also shows the largest model that has them
LONG = 1000  # steps: and a training of at least so many


@dataclass(frozen=True)
class Task:
    """A task of compressor_loss.py and few_bits.py. `size` in millions of parameters."""

    optimizer: str
    steps: int
    size: float = 0.1
    network: str = "GPT"


TASKS = {
    "gpt-adamw": Task(ADAMW, 120),
    "resnet-sgd": Task(SGD, 80, network="ResNet"),
    "lstm-sgd": Task(SGD, 150, network="LSTM"),
    "gpt-muon": Task(MUON, 120),
    "gpt-muon-400": Task(MUON, 400),
    "gpt-muon-0.9m": Task(MUON, 400, 0.9),
    "gpt-adamw-400": Task(ADAMW, 400),
}
MUON_TASKS = "gpt-muon-400", "gpt-muon-0.9m"
OF_FEW_BITS = *MUON_TASKS, "gpt-adamw-400"  # of few_bits.py
NETWORKS = "ResNet", "LSTM"  # SGD's, each of which has its own loss
LOW_RANK = "powersgd:rank=8,payload=int8"
WARMED = f"{LOW_RANK},start_iter=30,warmup=int8"
WARM = re.compile(r"[:,]start_iter=(\d+)$")  # uncompressed steps


@dataclass(frozen=True)
class Trainings:
    """Finished trainings of one kind, which differ in their compressor and seed alone.

    `losses`: {compressor: {seed: validation loss}}. `size` in millions of parameters. `ratios`: how many times fewer bytes
    compressors sent in all, where that is known. The command of `source` has places
    for {compressors} and {seeds}.
    """

    optimizer: str
    size: float
    source: Source
    losses: dict[str, dict[Any, float]]
    baseline: str = "none"
    network: str = "GPT"
    ratios: dict[str, float] = field(default_factory=dict)

    def excess(self, spec: str) -> list[float]:
        """Return per cent above the baseline, for each seed that both have."""
        found, base = self.losses[spec], self.losses[self.baseline]
        return [100 * (found[seed] / base[seed] - 1) for seed in sorted(found) if seed in base]

    def ran(self, *specs: str) -> Source:
        """Return the source with the command that trains these compressors and the baseline, with their seeds."""
        names = shlex.join(dict.fromkeys((self.baseline, *specs)))
        seeds = " ".join(map(str, sorted({seed for spec in specs for seed in self.losses[spec]})))
        return replace(self.source, command=self.source.command.format(compressors=names, seeds=seeds))

    def names_of(self, spec: str) -> list[str]:
        """Return the names under which a compressor ran as `attach` sets it for this optimizer."""
        names = spec, *AS_ATTACH.get((spec, self.optimizer), [])
        return [each for each in self.losses if WARM.sub("", each) in names and self.excess(each)]


def gathered(rows: list[dict[str, Any]], loss_of: str = "loss") -> dict[str, dict[Any, float]]:
    """Return {compressor: {seed: loss}} of rows."""
    losses: dict[str, dict[Any, float]] = {}
    for row in rows:
        if row.get(loss_of) is not None:
            losses.setdefault(row["compressor"], {})[row.get("seed", 0)] = row[loss_of]
    return losses


def on_a_gpu(file: str, optimizer: str, steps: int) -> Trainings:
    """Return the trainings of a file of gpu_quality.py, without local SGD."""
    rows = [
        row
        for row in raw(file)
        if (row["optimizer"], row["steps"]) == (optimizer, steps) and not row.get("local_every")
    ]
    folder = "quality"
    if file == GPT2 and steps == 400:  # two calls with one seed: each has its own baseline, and its own folder
        rows, folder = (
            [{**row, "seed": row["call"]} for row in rows],
            "quality-1, and once more with --folder quality-2",
        )
    about = {key: rows[0][key] for key in ("size", "steps", "lr", "batch", "bucket_mb", "optimizer")}
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in about.items() if value is not None)
    seeds = "--seed 0" if file == GPT2 else "--seed {seeds}"
    command = f"{QUALITY} {{compressors}} {seeds} {options} --no-checkpoints --folder {folder}"
    source = Source(file, command, H200, f"{rows[0]['parameters'] / 1e6:.0f} M", f"{steps:,}")
    ratios = {row["compressor"]: row["ratio"] for row in rows if "ratio" in row}
    size, kind = rows[0]["parameters"] / 1e6, {"adamw": ADAMW, "muon": MUON}[optimizer]
    return Trainings(kind, size, source, gathered(rows), ratios=ratios)


def of_study(simulated: bool) -> Trainings:
    """Return the trainings of study `time-to-accuracy-gpt`: on simulated ranks, or the earlier ones in a lab."""
    rows = [row for point in raw(STUDY) for row in point["rows"] if (row.get("netlab.rate") is None) == simulated]
    losses = gathered([row for row in rows if row["steps"] == 120], "eval.loss")
    baseline = "none" if losses.get("none", {}).keys() >= losses["bf16"].keys() else "bf16"
    about = "four simulated ranks" if simulated else "four emulated hosts on two CPU cores"
    size = "19 M" if baseline == "none" else f"19 M against `{baseline}`"
    source = Source(STUDY, "gradwire sweep --config time-to-accuracy-gpt", about, size, "120")
    return Trainings(ADAMW, 19.2, source, losses, baseline)


def of_task(file: str, name: str, rows: list[dict[str, Any]], script: str) -> Trainings:
    """Return the trainings of a task of one of the files of simulated ranks."""
    task = TASKS[name]
    source = Source(file, f"python docs/benchmarks/{script}", RANKS, f"{task.size} M", str(task.steps))
    return Trainings(task.optimizer, task.size, source, gathered(rows), network=task.network)


def of_table(file: str, name: str) -> Trainings:
    """Return the trainings of a task of one of the files of docs/results/loss."""
    rows = [row for row in raw(file)["runs"] if row["task"] == name]
    asked = f"--tasks {name} --seeds {{seeds}} --compressors {{compressors}}"
    return of_task(file, name, rows, f"compressor_loss.py {file} {asked}")


def of_few_bits(name: str) -> Trainings:
    """Return the trainings of a task of few_bits.py, whose Muon computes in float32."""
    rows = [{**row, "compressor": row["way"]} for row in raw(FEW_BITS)["runs"] if row["task"] == name]
    asked = f"--tasks {name} --ways {{compressors}} --seeds {{seeds}}"
    return of_task(FEW_BITS, name, rows, f"few_bits.py few-bits-muon {asked}")


def of_quality(study: str, model: str, optimizer: str, size: float, network: str = "GPT") -> Trainings:
    """Return the trainings of a model in a study of compressors after uncompressed steps."""
    file = f"docs/results/{study}/points.jsonl"
    rows = [row for point in raw(file) for row in point["rows"] if row["model"] == model]
    sent = {row["compressor"]: row["total_sent_bytes"] for row in rows}
    command = f"gradwire sweep --config {study} --out docs/results/{study}"
    source = Source(file, command, RANKS, f"{size} M", str(rows[0]["steps"]))
    ratios = {name: sent["none"] / nbytes for name, nbytes in sent.items()}
    return Trainings(optimizer, size, source, gathered(rows, "eval.loss"), network=network, ratios=ratios)


def of_long_runs(optimizer: str) -> Trainings:
    """Return the trainings of hundredfold.py that average gradients at every step, on 20 tokens per parameter."""
    form = {ADAMW: '"{}, lr 0.012"', MUON: '"Muon, {}, AdamW\'s lr 0.064"'}[optimizer]
    ways = [form.format(way) for way in ("none", "int8 at every step", "int4 at every step")]
    changes = {ADAMW: {"lr": 0.012}, MUON: {"optimizer": "muon", "lr": 0.064}}[optimizer]
    named = {"none": changes} | {spec: changes | {"first": spec} for spec in ("int8", "int4")}
    runs = [run for run in raw(LONG_RUNS)["runs"] if run["steps"] == 2688]
    rows = [{**run, "compressor": name} for run in runs for name, way in named.items() if run["way"] == way]
    command = f"python docs/benchmarks/hundredfold.py {LONG_RUNS} --ways {' '.join(ways)} --seeds {{seeds}}"
    source = Source(LONG_RUNS, command, "4 simulated sites on two CPU cores", "0.1 M", "2,688")
    return Trainings(optimizer, 0.1, source, gathered(rows))


INT4 = {"start": 0.0, "every": 4, "compressor": "int4"}
ONEBIT = INT4 | {"compressor": "onebit"}
# of hundredfold.py: a name, the optimizer, steps, the rate of `none`, a way with its best rate, and a larger model's size
FEWER_BYTES: tuple[tuple[Any, ...], ...] = (
    ("sites onebit AdamW 20", ADAMW, 2688, 0.012, "every 4, onebit", ONEBIT | {"lr": 0.016}),
    ("sites onebit AdamW 80", ADAMW, 10752, 0.008, "every 4, onebit", ONEBIT | {"lr": 0.016}),
    ("sites onebit Muon 20", MUON, 2688, 0.064, "every 4, onebit", ONEBIT | {"lr": 0.128}),
    ("sites onebit Muon 80", MUON, 10752, 0.064, "every 4, onebit", ONEBIT | {"lr": 0.128}),
    ("sites often AdamW", ADAMW, 10752, 0.008, "every 4, int4", INT4 | {"lr": 0.012}),
    ("sites often Muon", MUON, 10752, 0.064, "every 2, onebit", ONEBIT | {"every": 2, "lr": 0.128}),
    (
        "loss core Muon, longest",
        MUON,
        2688,
        0.064,
        "int4 and a core at every step",
        {"first": "int4:core=4", "lr": 0.064},
    ),
    (f"loss int8 Muon, {LARGER}", MUON, 2688, 0.064, "int8 at every step", {"first": "int8", "lr": 0.064}, LARGER),
)


def of_a_hundredth() -> Iterator[Claim]:
    """Yield losses and bytes of fewer rounds and of fewer bits, against averages at every step, at their best rates."""
    for name, optimizer, steps, lr, named, changes, *larger in FEWER_BYTES:
        of_optimizer, names = {ADAMW: ({}, "{}, lr {}"), MUON: ({"optimizer": "muon"}, "Muon, {}, AdamW's lr {}")}[
            optimizer
        ]
        runs = [run for run in raw(LONG_RUNS)["runs"] if run["steps"] == steps]
        of_model = of_optimizer | ({"size": larger[0]} if larger else {})
        both = of_model | {"lr": lr}, of_model | changes
        base, rounds = ({run["seed"]: run for run in runs if run["way"] == way} for way in both)
        names = f"{larger[0]}: {names}" if larger else names
        ways = f'"{names.format("none", lr)}" "{names.format(named, changes["lr"])}"'
        command = f"python docs/benchmarks/hundredfold.py {LONG_RUNS} --steps {steps} --ways {ways}"
        source = Source(LONG_RUNS, command, "4 simulated sites on two CPU cores", *larger or ["0.14 M"], f"{steps:,}")
        excess = [100 * (rounds[seed]["loss"] / base[seed]["loss"] - 1) for seed in sorted(base.keys() & rounds)]
        fewer = base[0]["sent_bytes"] / rounds[0]["sent_bytes"]
        yield Claim(name, MEASURED, source, lambda it=excess: it, loss)
        yield Claim(f"bytes {name}", MEASURED, source, lambda it=fewer: [it], times)
        if name in ("sites onebit AdamW 80", "sites onebit Muon 80"):  # 2,688 steps with int4 take as long, where one
            before = of_long_runs(optimizer).losses["int4"]  # takes 5.6 times its computation
            against = [100 * (rounds[seed]["loss"] / before[seed] - 1) for seed in sorted(base.keys() & rounds)]
            yield Claim(f"{name} over int4", MEASURED, source, lambda it=against: it, loss)
    for size, optimizer in (("0.4 M", ADAMW), ("0.9 M", ADAMW), ("0.9 M", MUON)):  # at the best rates that ran
        of_muon = optimizer == MUON
        runs = [
            (run["way"].get("compressor"), run["loss"])
            for run in raw(LONG_RUNS)["runs"]
            if run["seed"] == 0 and run["way"].get("size") == size and ("optimizer" in run["way"]) == of_muon
            if "first" not in run["way"]
        ]
        none, rounds = (min(ended for spec, ended in runs if spec == wanted) for wanted in (None, "onebit"))
        command = f"python docs/benchmarks/hundredfold.py {LONG_RUNS} --ways, with each way of {size} in the table"
        about = Source(LONG_RUNS, command, "4 simulated sites on two CPU cores", size, "2,688", seeds=1)
        name = f"sites onebit {size}{', Muon' * of_muon}"
        yield Claim(name, MEASURED, about, lambda it=100 * (rounds / none - 1): [it], loss)


def of_script(script: str, file: str, optimizer: str, size: float = 0.9, steps: int = 150) -> Trainings:
    """Return the trainings of a script of docs/examples, all of whose parameters train."""
    kind, given = (
        (ADAMW, "") if optimizer == "-" else ({"adamw": ADAMW, "muon": MUON}[optimizer], f" --optimizer {optimizer}")
    )
    rows = [row for row in raw(file) if row.get("optimizer", "-") == optimizer and not row.get("lora")]
    run = f"torchrun --nproc-per-node 2 docs/examples/{script}{given} --compressor $compressor --seed $seed"
    command = f"for compressor in {{compressors}}; do for seed in {{seeds}}; do {run}; done; done"
    source = Source(file, command, "two ranks on two CPU cores", f"{size} M", str(steps))
    baseline = "torch" if file == SHARDED else "none"
    return Trainings(kind, size, source, gathered(rows, "validation_loss"), baseline)


@cache
def all_trainings() -> list[Trainings]:
    """Return all trainings that compare compressors as `attach` sets them, the largest models first."""
    of_loss = [(file, task) for file in (TABLE, FEEDBACK) for task in TASKS if task not in OF_FEW_BITS]
    return [
        on_a_gpu(GPT2, "adamw", 700),
        on_a_gpu(GPT2, "adamw", 400),
        of_study(True),
        of_study(False),
        on_a_gpu(SMALL, "adamw", 2000),
        on_a_gpu(SMALL, "muon", 1400),
        of_quality("quality-muon", "gpt", MUON, 2.5),
        of_quality("quality-long", "gpt", ADAMW, 0.5),
        of_quality("quality-long", "resnet18-cifar", SGD, 0.3, "ResNet"),
        *(of_script("train_gpt.py", EXAMPLES, optimizer) for optimizer in ("adamw", "muon")),
        *(of_table(file, task) for file, task in of_loss),
        *map(of_few_bits, OF_FEW_BITS),
        *map(of_long_runs, (ADAMW, MUON)),
        *(of_table(WARM_UP, task) for task in MUON_TASKS),
    ]


def largest(
    spec: str, optimizer: str, network: str = "", seeds: int = 1, *, cold: bool = False
) -> tuple[Trainings, str] | None:
    """Return the largest trainings of a compressor with an optimizer, and its name there; None if it did not run.

    Of equal ones those with most seeds; of these the worst. `network`: this one alone; `seeds`: with at least as many;
    `cold`: compressed from the first step, and of equal ones the worst.
    """
    found = [
        (trainings, name)
        for trainings in all_trainings()
        if trainings.optimizer == optimizer and trainings.baseline != spec and network in ("", trainings.network)
        for name in trainings.names_of(spec)
        if len(trainings.excess(name)) >= seeds and not (cold and warm(name))
    ]
    if not found:
        return None
    newest = {(it.network, it.source.steps, it.size, warm(name)): (it, name) for it, name in reversed(found)}
    found = sorted(newest.values(), key=lambda each: -each[0].size)
    first = found[0][0]
    equal = [each for each in found if (each[0].size, each[0].source.steps) == (first.size, first.source.steps)]
    equal = equal if first.size > 1 else [each for each in found if each[0].size == first.size]
    return max(equal, key=lambda each: (not cold and len(each[0].excess(each[1])), mean(each[0].excess(each[1]))))


def warm(name: str) -> bool:
    """Return True if a training began with uncompressed steps."""
    return WARM.search(name) is not None


def longest(spec: str, optimizer: str) -> tuple[Trainings, str] | None:
    """Return the largest long trainings of a compressor with an optimizer, over enough seeds; None if there are none."""
    found = [
        (trainings, name)
        for trainings in all_trainings()
        if trainings.optimizer == optimizer and trainings.baseline != spec
        for name in trainings.names_of(spec)
        if len(trainings.excess(name)) >= ENOUGH and steps_of(trainings) >= LONG
    ]
    return max(found, key=lambda each: each[0].size, default=None)


def steps_of(trainings: Trainings) -> int:
    """Return the number of steps of each training."""
    return int(trainings.source.steps.replace(",", ""))


def of_low_rank_bytes() -> Iterator[Claim]:
    """Yield how many times fewer bytes PowerSGD sent in the trainings whose losses the tables show."""
    study = Source(STUDY, "gradwire sweep --config time-to-accuracy-gpt", "four simulated ranks", "19 M", "120")
    rows = [row for point in raw(STUDY) for row in point["rows"] if row.get("netlab.rate") is None]
    gpt2 = on_a_gpu(GPT2, "adamw", 400).ran("powersgd:rank=32,payload=int4")
    for spec, source, found in (
        (LOW_RANK, study, {row["compressor"]: row["compression_ratio"] for row in rows}),
        ("powersgd:rank=32,payload=int4", gpt2, {row["compressor"]: row["ratio"] for row in raw(GPT2)}),
    ):
        yield Claim(f"bytes {spec}", MEASURED, source, lambda it=found[spec]: [it], times)
    runs = {row["way"]: row["sent_bytes"] for row in raw(FEW_BITS)["runs"] if row["task"] == MUON_TASKS[-1]}
    cored = of_few_bits(MUON_TASKS[-1]).ran("int4, core 4")
    yield Claim("bytes int4:core=4", MEASURED, cored, lambda: [runs["none"] / runs["int4, core 4"]], times)


def of_candidates() -> Iterator[Claim]:
    """Yield the losses of each candidate of `advise` by optimizer: `shown_losses` tells which are where."""
    for candidate in CANDIDATES[1:]:
        for optimizer in OPTIMIZERS:
            for name, found in shown_losses(candidate.spec, optimizer).items():
                yield _claim(f"{candidate.spec} {name}", *found)


def shown_losses(spec: str, optimizer: str) -> dict[str, tuple[Trainings, str]]:
    """Return {name: trainings} of what the tables show of a compressor.

    The largest model, with SGD that of each network by its name; where that has fewer than three seeds, also the largest
    that has them; where one of these began with uncompressed steps, also the largest that did not, with three seeds if any
    has; and the largest training of at least 1,000 steps with three seeds.
    """
    shown = {}
    for network in NETWORKS if optimizer == SGD else ("",):
        name = f"{optimizer}, {network}" if network else optimizer
        first, enough = largest(spec, optimizer, network), largest(spec, optimizer, network, ENOUGH)
        several = (largest(spec, optimizer, network, seeds, cold=True) for seeds in (ENOUGH, 1))
        cold = next(filter(None, several), None) if any(each and warm(each[1]) for each in (first, enough)) else None
        shown |= {name: first}
        shown |= {f"{name}, {ENOUGH} seeds": enough} if enough != first else {}
        shown |= {f"{name}, {COLD}": cold} if cold not in (first, enough) else {}
        shown |= {f"{name}, longest": longest(spec, optimizer)} if not network else {}
    return {name: each for name, each in shown.items() if each}


def _claim(name: str, trainings: Trainings, spec: str, form: Callable[..., str] = loss) -> Claim:
    uncompressed = WARM.search(spec)
    in_all = f": {times([trainings.ratios[spec]])} in all" if spec in trainings.ratios else ""
    warm_up = f" (the first {uncompressed[1]} uncompressed{in_all})" if uncompressed else ""
    source = replace(trainings.ran(spec), warm_up=warm_up)
    return Claim(f"loss {name}", MEASURED, source, lambda: trainings.excess(spec), form)


def after(run: dict[str, Any], base: dict[str, Any], step: str) -> float:
    """Return per cent of a run's validation loss above another's after a step."""
    return 100 * (run["losses"][step] / base["losses"][step] - 1)


def low_rank() -> Iterator[Claim]:
    """Yield what PowerSGD did at 128 M parameters."""
    runs = {(run["compressor"], run["call"]): run for run in raw(GPT2) if "call" in run}
    run, base = runs["powersgd:rank=32,payload=int4", 2], runs["none", 2]
    source = on_a_gpu(GPT2, "adamw", 400).ran(run["compressor"])
    ended = lambda: [after(run, base, "400")]  # noqa: E731
    yield Claim(f"loss {run['compressor']} {ADAMW}", MEASURED, source, ended, loss)
    for step in ("100", "200", "300", "400"):
        compute = lambda step=step: [after(run, base, step)]  # noqa: E731
        yield Claim(f"rank 32 {step}", MEASURED, source, compute, loss)
        yield Claim(f"rank 32 bare {step}", MEASURED, source, compute, lambda values: loss(values).removesuffix(" %"))


def on_gpus() -> Iterator[Claim]:
    """Yield losses of trainings on a GPU that pages name."""
    yield _claim("PowerSGD after a warm-up", *of_warmed())
    full, first = on_a_gpu(GPT2, "adamw", 700), on_a_gpu(GPT2, "adamw", 400)
    yield _claim("int4 128 M", full, "int4:error_feedback=false,start_iter=100")
    yield _claim("int4 feedback 128 M", full, "int4:error_feedback=true,start_iter=100")
    one_seed = replace(first, source=replace(first.source, seeds=1))  # two runs of it
    yield _claim("int4 first step 128 M", one_seed, "int4:error_feedback=true")
    adamw, muon = on_a_gpu(SMALL, "adamw", 2000), on_a_gpu(SMALL, "muon", 1400)
    yield _claim("int8 11 M", adamw, "int8:error_feedback=false,start_iter=100")
    yield _claim("int8 Muon 11 M", muon, "int8:error_feedback=true,start_iter=100")
    yield _claim("int4 Muon 11 M", muon, "int4:start_iter=100")
    later = on_a_gpu(FEWER, "muon", 2000)
    for spec in ("int4:start_iter=500,warmup=int8", "powersgd:rank=64,payload=int4,start_iter=500,warmup=int8"):
        yield _claim(f"{spec} Muon 11 M", later, spec)
        bytes_of = lambda spec=spec: only({row["ratio"] for row in raw(FEWER) if row["compressor"] == spec})  # noqa: E731
        yield Claim(f"bytes {spec}", MEASURED, later.ran(spec), bytes_of, times)
    for optimizer in ("adamw", "muon"):
        uncompressed = on_a_gpu(FEWER, optimizer, 2000).ran("none")
        command = uncompressed.command.replace("none", "int4") + " --local-every 16 --outer muloco"
        source = replace(uncompressed, command=f"{uncompressed.command} && {command}")
        runs = [row for row in raw(FEWER) if row["optimizer"] == optimizer and row["steps"] == 2000]
        base = {row["seed"]: row["loss"] for row in runs if row["compressor"] == "none" and not row.get("local_every")}
        rounds = [row for row in runs if row.get("local_every") == 16 and row.get("outer") == "muloco"]
        above = lambda it=rounds, base=base: [100 * (row["loss"] / base[row["seed"]] - 1) for row in it]  # noqa: E731
        yield Claim(f"sites {optimizer} 11 M", MEASURED, source, above, loss)
    noise = [run["losses"]["100"] for run in raw(GPT2) if run["steps"] == 700]  # all of them uncompressed until then
    spread = lambda: [100 * (max(noise) / min(noise) - 1)]  # noqa: E731
    again = [run["losses"]["400"] for run in raw(GPT2) if run["steps"] == 400 and run["compressor"] == "none"]
    apart = lambda: [100 * (max(again) / min(again) - 1)]  # noqa: E731
    yield Claim("again 128 M", MEASURED, replace(first.ran("none"), seeds=1), apart, per_cent)
    yield Claim("floor 128 M", MEASURED, replace(full.ran(*full.losses), steps="100"), spread, whole_per_cent)
    yield Claim("noise 128 M", MEASURED, replace(full.ran(*full.losses), steps="100"), spread, per_cent)


def of_warmed() -> tuple[Trainings, str]:
    """Return the trainings of PowerSGD after a warm-up in 8 bits, with three seeds if they ran."""
    return next((each, WARMED) for each in (of_study(True), of_study(False)) if WARMED in each.losses)


def of_small_models() -> Iterator[Claim]:
    """Yield losses of smaller models than those of the tables, which pages name."""
    warmed, (longer, spec) = of_warmed(), (of_quality("quality-long", "gpt", ADAMW, 0.5), f"{LOW_RANK},start_iter=60")
    yield _claim("PowerSGD 0.5 M", longer, spec)
    fewer = {row["compressor"]: row["compression_ratio"] for row in study_rows("time-to-accuracy-gpt")}
    small = {row["compressor"]: row["compression_ratio"] for row in study_rows("quality-long") if row["model"] == "gpt"}
    for name, trainings, parts in (  # (steps, how many times fewer bytes) of a training's parts
        ("PowerSGD after a warm-up", warmed[0].ran(warmed[1]), ((30, fewer["int8"]), (90, fewer[LOW_RANK]))),
        ("PowerSGD 0.5 M", longer.ran(spec), ((60, 1.0), (340, small[spec]))),
    ):
        in_all = sum(steps for steps, _ in parts) / sum(steps / ratio for steps, ratio in parts)
        yield Claim(f"bytes {name}", MEASURED, trainings, lambda it=in_all: [it], times)
    for spec in ("int8", "int4"):
        yield _claim(f"{spec} AdamW, 2,688 steps", of_long_runs(ADAMW), spec)
    for spec in ("int8", "int4"):  # bf16 is as int8: the table of docs/examples.md
        yield _claim(f"{spec} fine-tuning", of_script("train_finetune.py", FINE_TUNED, "-", 0.8, 100), spec)
    for pair in ("int8", "int8/int4"):
        sharded = of_script("train_gpt_fsdp.py", SHARDED, "muon")
        claim = _claim("", sharded, pair)
        yield replace(claim, name=f"fsdp Muon {pair}")


def claims() -> Iterator[Claim]:
    """Yield all claims of losses."""
    yield from of_small_models()
    yield from of_a_hundredth()
    yield from of_candidates()
    yield from of_low_rank_bytes()
    yield from low_rank()
    yield from on_gpus()
