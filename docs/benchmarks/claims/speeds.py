"""Claims of time and bytes: measured on emulated hosts and on GPUs, published, and predicted."""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

import torch
from predicted_steps import H100_STEP

from claims.claim import (
    MEASURED,
    PREDICTED,
    ROOT,
    SETTING,
    Claim,
    Source,
    finely,
    loss,
    number,
    per_cent,
    raw,
    study_rows,
    times,
)
from claims.losses import STUDY, WARMED
from gradwire.experiments.results.rows import Row
from gradwire.experiments.sweep.columns import seconds_of_steps, time_to_loss

WITHIN = 0.01  # the target: the training loss that bf16 ends with, and one per cent more
FSDP, FSDP_EARLIER = "docs/benchmarks/fsdp-1gbit.json", "docs/benchmarks/fsdp-1gbit-earlier.json"
REPLICATE = "docs/benchmarks/replicate-1gbit.json"
H100, H200 = (f"docs/benchmarks/{name}/step-gpu.json" for name in ("h100", "h200"))
HOST_BOUND = "docs/benchmarks/h200/step-host.json"
HOOKS = "docs/benchmarks/native-100mbit.json"
FSDP_LOSS, FSDP_WEIGHTS = "docs/benchmarks/fsdp2-losses.json", "docs/benchmarks/fsdp2-losses-weights.json"
FSDP_HOSTS = {"100mbit": ["int8/int8"], "1gbit": ["int8/int4", "int4/int4"]}
MEMORY = "docs/benchmarks/memory.json"
STEP_TIME = "python docs/benchmarks/step_time.py"
CORES = "four emulated hosts on two CPU cores"
WINDOWS, WEIGHTS = (
    (5, 10, 20),
    (0.05, 0.2),
)  # of other smoothings: means of so many losses, and averages by the newest's weight
Smooth: TypeAlias = Callable[[Sequence[float]], list[float]]
Reaches: TypeAlias = Callable[[Row, Row], float | str | None]


def reached(values: Sequence[float]) -> str:
    """Return the speed-ups of all runs of the lab, if every seed reached the loss."""
    return times(values) if values else "not on all seeds"


def by_average(row: Row, other: Row) -> float | str | None:
    """Return the seconds until the loss, an exponential average, is within one per cent of what the other row ends with."""
    return time_to_loss(row, other, within=WITHIN)


def in_means(window: int) -> Smooth:
    """Return means of the last losses."""
    return lambda each: [sum(each[max(0, end - window) : end]) / min(window, end) for end in range(1, len(each) + 1)]


def in_averages(weight: float) -> Smooth:
    """Return exponential averages without their bias to the start, with the weight of the newest loss."""

    def smooth(each: Sequence[float]) -> list[float]:
        total, whole, averages = 0.0, 0.0, []
        for value in each:
            total, whole = (1 - weight) * total + value, (1 - weight) * whole + 1
            averages.append(total / whole)
        return averages

    return smooth


def by(smooth: Smooth) -> Reaches:
    """Return what `by_average` does, with another smoothing."""

    def reaches(row: Row, other: Row) -> float | None:
        target = smooth(other["loss"])[-1] * (1 + WITHIN)
        ends = zip(smooth(row["loss"]), row["train_seconds"], strict=True)
        return next((seconds for loss, seconds in ends if loss <= target), None)

    return reaches


def by_all() -> list[Reaches]:
    """Return the way of the study and the others."""
    return [by_average, *(by(each) for each in (*map(in_means, WINDOWS), *map(in_averages, WEIGHTS)))]


def to_target(spec: str, rate: str, reaches: Reaches = by_average, *, by_seed: bool = False) -> tuple[list[float], int]:
    """Return speed-ups over bf16 of the time to bf16's last training loss and one per cent, and how many seeds ran.

    `reaches` smooths the losses. One for each run of the lab that timed both, as means over seeds unless `by_seed`; or that
    of an earlier training of one seed in the lab. None at all if a seed never gets there.
    """
    points = raw(STUDY)
    trained = [row for point in points for row in point["rows"] if row["steps"] == 120]
    simulated = pairs([row for row in trained if row.get("netlab.rate") is None], spec)
    if not simulated:
        found = [speed_up(*each) for each in pairs([row for row in trained if row.get("netlab.rate") == rate], spec)]
        return [each for each in found if each is not None], len(found)
    if not all(isinstance(reaches(mine, other), float | int) for mine, other in simulated):
        return [], len(simulated)
    runs = [[row for row in point["rows"] if row.get("netlab.rate") == rate] for point in points]
    labs = [{row["compressor"]: row for row in rows if row["steps"] < 120} for rows in runs]
    apart = (
        [lab for lab in labs if name in lab] for name in ("bf16", spec)
    )  # PowerSGD's runs follow those of the others
    both = [one | other for one, other in zip(*apart, strict=False)]
    timed = [[speed_up(*each, lab, reaches) for each in simulated] for lab in both]
    if by_seed:
        return [value for each in timed for value in filter(None, each)], len(simulated)
    return [sum(filter(None, each)) / len(each) for each in timed], len(simulated)


def smoothed(spec: str, rate: str, *, by_seed: bool = False) -> list[float]:
    """Return the speed-ups of all runs of the lab, by each way to smooth losses by which all seeds reach the target."""
    return [value for reaches in by_all() for value in to_target(spec, rate, reaches, by_seed=by_seed)[0]]


def pairs(rows: Sequence[Row], spec: str) -> list[tuple[Row, Row]]:
    """Return the rows of a compressor, each with that of bf16 with the same seed."""
    base = {row.get("seed"): row for row in rows if row["compressor"] == "bf16"}
    return [(row, base[row.get("seed")]) for row in rows if row["compressor"] == spec and row.get("seed") in base]


def speed_up(
    mine: Row, other: Row, lab: Mapping[str, Row] | None = None, reaches: Reaches = by_average
) -> float | None:
    """Return the speed-up of a training over that of bf16 to the target, with the times of a lab; None without it."""
    timed = [
        {**row, "train_seconds": seconds_of_steps(row, lab[row["compressor"]])} if lab else row for row in (mine, other)
    ]
    first, second = (reaches(row, timed[1]) for row in timed)
    return second / first if isinstance(first, float | int) and isinstance(second, float | int) else None


def to_accuracy() -> Iterator[Claim]:
    """Yield the speed-ups over bf16 of time to one target, of the GPT on four emulated hosts."""
    rows = [row for point in raw(STUDY) for row in point["rows"] if row["steps"] == 120]
    for spec in dict.fromkeys(row["compressor"] for row in rows):
        for rate in ("100mbit", "1gbit"):
            if any(row["compressor"] == spec and row.get("netlab.rate", rate) == rate for row in rows):
                values, seeds = to_target(spec, rate)
                told = reached(values) + (" (1 seed)" if seeds == 1 else "")
                source = Source(
                    STUDY, "gradwire sweep --config time-to-accuracy-gpt", CORES, "19 M", "120", seeds=seeds
                )
                yield Claim(
                    f"time {spec} {rate}", MEASURED, source, lambda values=values: values, lambda _, told=told: told
                )
    for rate in ("100mbit", "1gbit"):
        of_lab = pairs([row for row in rows if row.get("netlab.rate") == rate], "int4")
        earlier = [speed_up(*each, reaches=reaches) for each in of_lab for reaches in by_all()]
        command = "gradwire with the arguments of the point of 2026-11-27"
        about = Source(STUDY, command, "four emulated hosts on an Intel Xeon", "19 M", "120", seeds=1)
        yield Claim(f"time int4 {rate} earlier", MEASURED, about, lambda it=earlier: it, times)
        for spec in ("bf16", "int8"):
            found, none = smoothed(spec, rate), smoothed("none", rate)
            both = [mine / base for mine, base in zip(found, none, strict=True)]
            yield Claim(f"time {spec} {rate} over none", MEASURED, source, lambda it=both: it, times)
        for spec in ("int8", "int4", WARMED):
            compute = lambda spec=spec, rate=rate: smoothed(spec, rate)  # noqa: E731
            yield Claim(f"time {spec} {rate} smoothings", MEASURED, source, compute, times)
            each_seed = lambda spec=spec, rate=rate: smoothed(spec, rate, by_seed=True)  # noqa: E731
            yield Claim(f"time {spec} {rate} seeds", MEASURED, source, each_seed, times)
    yield Claim("within", SETTING, source, lambda: [100 * WITHIN], number("%"))


def of_chart() -> Iterator[Claim]:
    """Yield the speed-ups over bf16 of README's chart at 1 and 10 Gbit/s: as computed, and in earlier runs."""
    file = "docs/results/gpt-bandwidth/earlier.csv"
    source = Source("docs/results/gpt-bandwidth/rows.csv", "gradwire sweep --config gpt-bandwidth", CORES, "19 M", "2")
    for rate, name in (("1gbit", " 1gbit"), ("10gbit", "")):
        rows = {row["compressor"]: row for row in study_rows("gpt-bandwidth") if row["netlab.rate"] == rate}
        for spec in ("int8", "int4"):
            for column, end in (("over_bf16", ""), ("over_bf16_computed", " computed")):
                shown = lambda row=rows[spec], column=column: [row[column]]  # noqa: E731
                yield Claim(f"chart {spec}{name}{end}", PREDICTED if end else MEASURED, source, shown, two_decimals)
    lines = list(csv.DictReader((ROOT / file).read_text("utf-8").splitlines()))
    for spec in ("int8", "int4"):
        earlier = [float(row["over_bf16"]) for row in lines if (row["rate"], row["compressor"]) == ("10gbit", spec)]
        about = dataclasses.replace(source, file=file)
        yield Claim(f"chart {spec} earlier", MEASURED, about, lambda it=earlier: it, times)
    longer = lambda: [100 * (rows["bf16"]["sec_per_iter.p50"] / rows["bf16"]["synchronous_bound_seconds"] - 1)]  # noqa: E731
    yield Claim("chart bf16 longer", MEASURED, source, longer, number("%"))


def of_hosts() -> Iterator[Claim]:
    """Yield the speed-up of hosts+int4 over hosts+bf16 where both were measured, and as it was predicted."""
    file = "docs/benchmarks/predicted-steps.csv"
    source = Source(
        file, "gradwire bench, the case lab-r18-2x2-1g", "two emulated hosts of two ranks", "ResNet-18", "20"
    )
    rows = csv.DictReader((ROOT / file).read_text("utf-8").splitlines())
    found = {row["compressor"]: row for row in rows if row["case"] == "lab-r18-2x2-1g"}
    for name, column in (("lab", "measured_ms"), ("predicted", "predicted_ms")):
        compute = lambda column=column: [  # noqa: E731
            float(found["hosts+bf16"][column]) / float(found["hosts+int4"][column])
        ]
        yield Claim(f"{name} hosts+int4", PREDICTED if name == "predicted" else MEASURED, source, compute, times)
    command = "python docs/benchmarks/predicted_steps.py --check"
    everywhere = dataclasses.replace(
        source, command=command, machine="emulated networks", model="11 M to 25 M", steps=""
    )
    yield Claim("gain of predicted", MEASURED, everywhere, gains_over_predicted, times)


def gains_over_predicted() -> list[float]:
    """Return the measured speed-up of each step with int8 or int4 over one with bf16, over the predicted one.

    A row's base is the last one of its case and its hosts above it.
    """
    base: dict[tuple[str, str], dict[str, str]] = {}
    found = []
    for row in csv.DictReader((ROOT / "docs/benchmarks/predicted-steps.csv").read_text("utf-8").splitlines()):
        hosts, spec = row["compressor"].rpartition("+")[::2]
        if spec == "bf16":
            base[row["case"], hosts] = row
        elif spec.partition(":")[0] in ("int8", "int4") and (before := base.get((row["case"], hosts))):
            measured, predicted = (float(before[each]) / float(row[each]) for each in ("measured_ms", "predicted_ms"))
            found.append(measured / predicted)
    return sorted(found)


def of_sites() -> Iterator[Claim]:
    """Yield the loss of local SGD over bf16 at every step, each at its best learning rate, after 200 steps and more."""
    study = "docs/results/local-steps/points.jsonl"
    losses: dict[tuple[object, ...], dict[int, float]] = {}  # of simulated ranks: by setting, then by seed
    for row in (row for point in raw(study) for row in point["rows"] if row.get("netlab.rate") is None):
        setting = row["compressor"], row["local_every"], row["steps"], row["lr"]
        losses.setdefault(setting, {})[row["seed"]] = row["eval.loss"]
    baseline = losses["bf16", 0, 200, 0.004]
    for (compressor, every, steps, lr), found in losses.items():
        if (every, lr) == (32, 0.003):
            source = Source(study, "gradwire sweep --config local-steps", "four simulated ranks", "0.9 M", str(steps))
            values = [100 * (found[seed] / baseline[seed] - 1) for seed in sorted(found)]
            name = f"sites {compressor}" + (f" {steps}" if steps != 200 else "")
            yield Claim(name, MEASURED, source, lambda it=values: it, loss)


def of_fsdp() -> Iterator[Claim]:
    """Yield step times of FSDP2 over bf16 both ways, and losses."""
    cases = {case["case"].removeprefix("fsdp:").removesuffix("@0"): case for case in raw(FSDP)["cases"]}
    pairs = " ".join(f"fsdp:{pair}@0" for pair in cases)
    command = f"gradwire netlab --hosts 4 --rate 1gbit -- {STEP_TIME} {pairs} --steps {raw(FSDP)['steps']}"
    source = Source(FSDP, command, CORES, "19 M", f"{raw(FSDP)['steps']}")
    for pair in cases:
        compute = lambda pair=pair: [cases["bf16/bf16"]["median_s"] / cases[pair]["median_s"]]  # noqa: E731
        yield Claim(f"fsdp {pair}", MEASURED, source, compute, two_decimals)
    for one, other in (("bf16/bf16", "none/none"), ("none/none", "torch")):
        compute = lambda one=one, other=other: [cases[other]["median_s"] / cases[one]["median_s"]]  # noqa: E731
        yield Claim(f"fsdp {one} over {other}", MEASURED, source, compute, two_decimals)
    before = {case["case"].removeprefix("fsdp:").removesuffix("@0"): case for case in raw(FSDP_EARLIER)["cases"]}
    about = dataclasses.replace(source, file=FSDP_EARLIER, machine="four emulated hosts on an Intel Xeon")
    for pair in ("int8/int8", "int8/int4", "int4/int4"):
        compute = lambda pair=pair: [before["bf16/bf16"]["median_s"] / before[pair]["median_s"]]  # noqa: E731
        yield Claim(f"fsdp {pair} earlier", MEASURED, about, compute, two_decimals)
    for rate, pairs_of_hosts in FSDP_HOSTS.items():
        file = f"docs/benchmarks/fsdp-hosts-{rate}.json"
        seconds = {
            case["case"].removeprefix("fsdp:").removesuffix("@0"): case["median_s"] for case in raw(file)["cases"]
        }
        steps, machine = raw(file)["steps"], "two emulated hosts of two ranks on two CPU cores"
        run = f"gradwire netlab --hosts 2 --rate {rate} --ranks-per-host 2 -- {STEP_TIME}, with the cases of the file"
        about = dataclasses.replace(source, file=file, command=run, machine=machine, steps=f"{steps}")
        for one in pairs_of_hosts:
            two = "/".join(f"hosts:ranks=2+{each}" for each in one.split("/"))
            ratio = lambda of=seconds, one=one, two=two: [of[one] / of[two]]  # noqa: E731
            yield Claim(f"fsdp hosts {one} {rate}", MEASURED, about, ratio, times)
            longer = lambda of=seconds, one=one, two=two: [100 * (of[two] / of[one] - 1)]  # noqa: E731
            yield Claim(f"fsdp hosts {one} {rate} longer", MEASURED, about, longer, lambda it: f"{it[0]:.0f}")
    weights = raw(FSDP_WEIGHTS)["losses"]
    base, sent = weights["none/none"], weights["int4:send=weights/none"]
    about = Source(FSDP_WEIGHTS, "see the file", "4 simulated ranks on two CPU cores", "0.1 M", "400")
    excess = lambda: [100 * (mine / other - 1) for mine, other in zip(sent, base, strict=True)]  # noqa: E731
    yield Claim("fsdp loss int4:send=weights/none", MEASURED, about, excess, loss)
    losses = raw(FSDP_LOSS)["losses"]
    command = f"python docs/benchmarks/fsdp2_losses.py {' '.join(losses)} --seeds 0 1 2 --validation 500"
    source = Source(FSDP_LOSS, command, "4 simulated ranks on two CPU cores", "0.1 M", "400")
    for pair, found in losses.items():
        compute = lambda found=found: [100 * (found[s] / losses["none/none"][s] - 1) for s in sorted(found)]  # noqa: E731
        yield Claim(f"fsdp loss {pair}", MEASURED, source, compute, loss)


def two_decimals(values: Sequence[float]) -> str:
    """Return a factor of a single run."""
    return f"{values[0]:.2f}x"


def of_replicate() -> Iterator[Claim]:
    """Yield how much longer steps are under replicate() than under DDP, in per cent."""
    seconds = {case["case"]: case["median_s"] for case in raw(REPLICATE)["cases"]}
    command = f"gradwire netlab --hosts 4 --rate 1gbit -- {STEP_TIME} {' '.join(seconds)} --rounds 4 --steps 6"
    source = Source(REPLICATE, command, CORES, "19 M", f"{raw(REPLICATE)['steps']}")
    for name, ours, ddp in (("int8", "replicate:int8@0", "int8@25"), ("torch", "replicate:torch@0", "torch:none@25")):
        compute = lambda ours=ours, ddp=ddp: [100 * (seconds[ours] / seconds[ddp] - 1)]  # noqa: E731
        yield Claim(f"replicate {name}", MEASURED, source, compute, number("%"))
    rounds = {case["case"]: case["rounds"] for case in raw(REPLICATE)["cases"]}["replicate:int8@0"]
    longer = [100 * (1 / each - 1) for each in rounds]
    yield Claim(
        "replicate int8 rounds", MEASURED, source, lambda: longer, lambda it: f"{min(it):.0f} to {max(it):.0f} %"
    )


@cache
def parameters_of_gpu_step() -> float:
    """Return the number of parameters, in millions, of the model that gpu_step.py times."""
    import gpu_step

    with torch.device("meta"):
        return sum(each.numel() for each in gpu_step.Gpt().parameters()) / 1e6


def gpu_step(bound: str, cases: Iterable[str], options: str) -> str:
    """Return the command that times these cases today: `int8` had error feedback then."""
    names = (each.replace(":int8@", ":int8:error_feedback=true@") for each in cases)
    return f"python docs/benchmarks/gpu_step.py {bound} {' '.join(names)} {options}"


def on_one_gpu() -> Iterator[Claim]:
    """Yield step times on one GPU over torch's DDP without compression, and of a hook over torch's on emulated hosts."""
    cases = {case["case"]: case["times_the_first"] for case in raw(H100)["cases"]}
    source = Source(H100, "make gpu PART=step OUT=docs/benchmarks/h100", "one H100", "162 M", "36")
    for case in ("gradwire:bf16@25", "gradwire:powersgd:rank=4@25", "torch:bf16@25", "torch:powersgd@25"):
        yield Claim(f"h100 {case}", MEASURED, source, lambda case=case: [cases[case]], finely)
    yield Claim("h100 parameters", MEASURED, source, lambda: [parameters_of_gpu_step()], number("M"))
    yield Claim("h100 step", MEASURED, source, lambda: [1e3 * H100_STEP["median_s"]], number("ms"))
    later = {case["case"]: case["times_the_first"] for case in raw(H200)["cases"]}
    source = Source(H200, gpu_step("gpu", later, "--rounds 2 --turns 3"), "one H200", "162 M", "12")
    for case in ("gradwire:int8@25", "gradwire:int4:error_feedback=false@25"):
        yield Claim(f"h200 {case}", MEASURED, source, lambda case=case: [100 * (later[case] - 1)], per_cent)
    small = {case["case"]: case["times_the_first"] for case in raw(HOST_BOUND)["cases"]}
    source = Source(HOST_BOUND, gpu_step("host", small, "--rounds 2"), "one H200", "4 M", "120")
    for case in ("gradwire:int8@1", "gradwire:int4:error_feedback=false@1", "gradwire:bf16@1", "torch:bf16@1"):
        yield Claim(f"h200 {case}", MEASURED, source, lambda case=case: [small[case]], two_decimals)
    hooks = {case["case"]: case["median_s"] for case in raw(HOOKS)["cases"]}
    command = f"gradwire netlab --hosts 4 --rate 100mbit -- {STEP_TIME} {' '.join(hooks)} --steps 20"
    source = Source(HOOKS, command, CORES, "19 M", "20")
    for case in ("powersgd:rank=1@25", "torch:powersgd@4000"):
        yield Claim(f"hook {case}", MEASURED, source, lambda case=case: [hooks[case]], number("s", 2))
    faster = lambda: [hooks["torch:powersgd@4000"] / hooks["powersgd:rank=1@25"]]  # noqa: E731
    yield Claim("hook over torch's", MEASURED, source, faster, times)


def of_memory() -> Iterator[Claim]:
    """Yield the MB that a step takes beyond torch's uncompressed one, of torch's buckets on their way."""
    source = Source(MEMORY, "python docs/benchmarks/memory.py", "two ranks on two CPU cores", "67 M", "6")
    for spec in ("int8", "bf16"):
        found = [raw(MEMORY)["cases"][f"views:{spec}"]["beyond torch"] * raw(MEMORY)["parameters"] / 1e6]
        yield Claim(f"memory peak {spec}", MEASURED, source, lambda it=found: it, lambda it: f"{round(it[0], -1):.0f}")


def claims() -> Iterator[Claim]:
    """Yield all claims of time and bytes."""
    yield from to_accuracy()
    yield from of_hosts()
    yield from of_sites()
    yield from of_fsdp()
    yield from of_replicate()
    yield from on_one_gpu()
    yield from of_chart()
    yield from of_memory()
