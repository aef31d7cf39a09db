"""How near predicted steps are to measured ones, and whether what `gradwire advise` recommends is what measures best.

Each case runs `gradwire advise`, and then `gradwire bench` for each of its compressors. The script writes steps.csv beside
their files and prints the table of docs/results/advise/README.md, from all that is there. A case that is named again is run
again, and medians count: what a machine does changes from minute to minute. Labs need Linux and root; a case takes minutes.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from driver import parser_of

from gradwire.experiments.advice import Choice, Rule
from gradwire.experiments.advice.candidates import BACKWARD, CANDIDATES, SGD, TWO_LEVELS, Candidate
from gradwire.experiments.advice.predict import Prediction

Key = tuple[str, str]  # compressor and order
Pairs = dict[Key, tuple[float, float]]  # predicted and measured seconds
NEAR = 1.05  # times the best measured step: as good
SOME = ("bf16", "int4", "powersgd:rank=4", "powersgd:rank=8,payload=int8")
FAST = ("none", "bf16", "int4", "powersgd:rank=4")
ALL = ("none", "int8", "int2", *SOME)
LEVELS = (*SOME, *(f"{TWO_LEVELS}{spec}" for spec in SOME))
CASES = {  # model, dilation, ranks, flags of ranks and rate, methods to measure in both orders
    "r18-2-100m": ("resnet18-cifar", 1, 2, "--nproc=2 --link=100mbit", SOME),
    "r18-4-1g": ("resnet18-cifar", 4, 4, "--nproc=4 --link=1gbit", SOME),
    "r18-8-10g": ("resnet18-cifar", 10, 8, "--nproc=8 --link=10gbit", FAST),
    "gpt-4-1g": ("gpt-20m", 2, 4, "--nproc=4 --link=1gbit", SOME),
    "gpt-2-10g": ("gpt-20m", 10, 2, "--nproc=2 --link=10gbit", ALL),
    "gpt-8-300m": ("gpt-20m", 8, 8, "--nproc=8 --link=300mbit", SOME[1:]),
    "r50-4-4g": ("resnet50", 8, 4, "--nproc=4 --link=4gbit", SOME),
    "r50-2-10g": ("resnet50", 6, 2, "--nproc=2 --link=10gbit", FAST),
    "mlp-2-300m": ("mlp", 1, 2, "--nproc=2 --link=300mbit", ALL),
    "mlp-2-3g": ("mlp", 1, 2, "--nproc=2 --link=3gbit", ALL),
    "lab-r18-4-1g": ("resnet18-cifar", 3, 4, "--netlab.hosts=4 --netlab.rate=1gbit", SOME),
    "lab-r18-8-1g": ("resnet18-cifar", 8, 8, "--netlab.hosts=8 --netlab.rate=1gbit", SOME),
    "lab-gpt-4-300m": ("gpt-20m", 1, 4, "--netlab.hosts=4 --netlab.rate=300mbit", SOME),
    "lab-r18-2x2-1g": (
        "resnet18-cifar",
        4,
        4,
        "--netlab.hosts=2 --netlab.ranks_per_host=2 --netlab.rate=1gbit",
        LEVELS,
    ),
}


MLP = ["--model=mlp", "--model.width=1024", "--model.layers=4"]  # as bench has it


def run(folder: Path, name: str) -> None:
    """The commands of a case. Each method has a run of its own, as with users: in turns they empty each other's caches."""
    model, dilate, ranks, flags, methods = CASES[name]
    real, same = model == "mlp", flags.split()
    same += ["--batch-size=32"] if real else [f"--compute=emulate:{model}", f"--dilate={dilate}"]
    bench = [f"--world-sizes={ranks}", "--no-ddp=false", "--warmup=2", "--order=backward,priority"]
    bench += ["--models=mlp", "--steps=20"] if real else ["--steps=4"]
    turn = len(list(folder.glob(f"{name}.*advise.json")))
    commands = {f"{name}.{turn}.advise": ["advise", *same, *(MLP if real else [])]}
    for number, spec in enumerate(methods):
        commands[f"{name}.{turn}.{number}.bench"] = ["bench", *same, *bench, f"--compressors={spec}"]
    for file, command in commands.items():
        kept = f"--json={folder / file}.json"
        with (folder / f"{file}.log").open("w") as log:
            subprocess.run([sys.executable, "-m", "gradwire", *command, kept], check=True, stdout=log)


def beside(folder: Path, name: str) -> tuple[Pairs, list[Key]]:
    """{(compressor, order): (predicted, measured)} of a case, medians of all its runs, in seconds, not dilated; what each of
    these recommends.
    """
    dilate = CASES[name][1]
    advice = [json.loads(file.read_text())["here"] for file in sorted(folder.glob(f"{name}.*advise.json"))]
    predicted, measured = defaultdict[Key, list[float]](list), defaultdict[Key, list[float]](list)
    for row in (row for each in advice for row in each["rows"]):
        predicted[row["compressor"], row["order"]].append(row["step"] / dilate)
    for file in sorted(folder.glob(f"{name}.*bench.json")):
        document = json.loads(file.read_text())
        for row in document["rows"]:
            measured[row["compressor"], row["order"]].append(warm(row, document) / dilate)
    pairs = {key: (median(predicted[key]), median(found)) for key, found in measured.items()}
    return pairs, [(each["recommended"]["compressor"], each["recommended"]["order"]) for each in advice]


def warm(row: dict[str, Any], document: dict[str, Any]) -> float:
    """Median seconds of a row, without the first measured turn of each rank: DDP still makes its buckets anew there."""
    turns = document["config"]["steps"]
    return median(seconds for place, seconds in enumerate(row["seconds"]) if place % turns)


def best_measured(pairs: Pairs) -> Key:
    """The last of the measured choices that are worth it by the rule of `advise`.

    None is not measured where it takes many times as long.
    """
    losses = {each.spec: each.losses[SGD] for each in CANDIDATES if SGD in each.losses}
    found = {key: seconds for key, (_, seconds) in pairs.items()}
    measured = {("none", BACKWARD): 10 * max(found.values()), **found}
    choices = [
        Choice(Candidate(spec), order, Prediction(seconds, 0.0, 0.0), losses[spec.removeprefix(TWO_LEVELS)])
        for (spec, order), seconds in measured.items()
    ]
    best = Rule().ladder(choices)[-1]
    return best.spec, best.order


def report(folder: Path, names: list[str]) -> None:
    """The steps as CSV, and the table of recommendations in Markdown."""
    errors, good, steps = [], [], ["case,compressor,order,predicted_ms,measured_ms,error"]
    cases = {name: found for name in names if (found := beside(folder, name))[0]}
    for name, (pairs, _) in cases.items():
        for (spec, order), (predicted, measured) in pairs.items():
            errors.append(abs(predicted / measured - 1))
            error = f"{predicted / measured - 1:+.1%}"
            steps.append(f'{name},"{spec}",{order},{predicted * 1e3:.1f},{measured * 1e3:.1f},{error}')
    (folder / "steps.csv").write_text("\n".join(steps) + "\n")
    print("| case | recommended | its step, ms | measures best | its step, ms | |\n|---|---|---|---|---|---|")
    for name, chosen in ((name, chosen) for name, (_, all_chosen) in cases.items() for chosen in all_chosen):
        pairs = cases[name][0]
        best = best_measured(pairs)
        mine = pairs[chosen][1] if chosen in pairs else float("nan")
        good.append(mine <= NEAR * pairs[best][1])
        words = [f"`{spec}`, {order}" for spec, order in (chosen, best)]
        print(
            f"| {name} | {words[0]} | {mine * 1e3:.1f} | {words[1]} | {pairs[best][1] * 1e3:.1f} | "
            f"{mine / pairs[best][1]:.2f}x |"
        )
    print(f"\n{len(errors)} steps: error median {median(errors):.1%}, worst {max(errors):.1%}")
    print(f"recommended is best or within {NEAR - 1:.0%}: {sum(good)} of {len(good)}")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, help="folder of the files")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    for each in asked.cases:
        run(asked.runs, each)
    report(asked.runs, [name for name in CASES if any(asked.runs.glob(f"{name}.*bench.json"))])
