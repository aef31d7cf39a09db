"""The host's time for a bucket, with a GPU that does nothing: torch's DDP and its hooks, and gradwire's.

    python host_time.py --json result.json
    python host_time.py gradwire:int8 --profile 10
    python host_time.py --shards --json shards.json

A bucket has 8 small tensors. A case's time is that of a step beyond a step without any DDP, in the same turn, by the number
of buckets, of this thread's processor alone. On a real GPU gpu_step.py measures the same; there launches and collectives
take the host a few microseconds each as well.

With --shards the rows are of FSDP2: the reduction of a module's gradients by a program, on some numbers of ranks.

A profile has the share of each Python function that a step without DDP does not call, with what that calls of C. Short
functions look longer there than they are.
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import step_time
import torch
from driver import about, parser_of, write_results
from null_device import NullKernel, null_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.compress import Layout, Ranks
from gradwire.compress.protocol.requests import Program, next_request
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.reduction import shard_sum
from gradwire.compress.simulate import alike

BUCKETS, LAYERS, WIDTH = 16, 4, 32  # layers of a bucket, each with two tensors
MEGABYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 2**20
CASES = ("none", "bf16", "int8", "int4", "topk:ratio=0.01", "powersgd:rank=4", "onebit")
TORCH = ("torch:none", "torch:bf16", "torch:powersgd")
WARM = 8  # steps: buckets are built anew, torch's PowerSGD begins
PROFILED = 50  # steps
SHARDS, RANKS = ("int8", "int4", "int4:residual_bits=8"), (8, 64, 256)
MODULE = Layout(("weight", "bias"), ((256, 80), (256,)), torch.float32, torch.device("cpu"))


def layers() -> nn.Module:
    """Small layers, of which each bucket has as many."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BUCKETS * LAYERS)))


def counted(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that a function makes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Operators(TorchDispatchMode):
    """Counts torch's operators by whether they only make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {False: 0, True: 0}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and call it."""
        self.counts[function.is_view] += 1
        return function(*args, **(kwargs or {}))


class Case(step_time.Case):
    """A case that counts its calls, too."""

    def run(self, inputs: Tensor) -> float:
        """Seconds of this thread in a forward and a backward."""
        start = time.thread_time()  # other processes do not count
        self.model(inputs).sum().backward()
        taken = time.thread_time() - start
        self.optimizer.zero_grad()
        return taken

    def calls(self, inputs: Tensor) -> int:
        """Calls of functions, Python's and C's, that a forward and a backward make."""
        count = counted(lambda: self.model(inputs).sum().backward())
        self.optimizer.zero_grad()
        return count

    def operators(self, inputs: Tensor) -> tuple[int, int]:
        """Torch's operators of a forward and a backward: those that compute or make memory, and views."""
        with Operators() as seen:
            self.model(inputs).sum().backward()
        self.optimizer.zero_grad()
        return seen.counts[False], seen.counts[True]

    def own_seconds(self, inputs: Tensor) -> dict[str, float]:
        """Seconds of each Python function in some steps, with what it calls of C, by file and name."""
        functions = cProfile.Profile(time.thread_time, builtins=False)
        functions.enable()
        for _ in range(PROFILED):
            self.run(inputs)
        functions.disable()
        found = pstats.Stats(functions).stats.items()  # type: ignore[attr-defined]
        return {f"{Path(file).stem}.{name}": own for (file, _, name), (_, _, own, _, _) in found}


def shares(case: Case, bare: Case, inputs: Tensor) -> dict[str, float]:
    """The share of each function that a step without DDP does not call, the largest first."""
    without, found = bare.own_seconds(inputs), case.own_seconds(inputs)
    found = {name: seconds for name, seconds in found.items() if name not in without}
    return {name: found[name] / sum(found.values()) for name in sorted(found, key=lambda name: -found[name])}


def measured(names: list[str], turns: int, *, profiled: bool = False) -> list[dict[str, Any]]:
    """A row for each case: microseconds, calls and launches for each bucket beyond no DDP."""
    inputs, cases = torch.ones(1, WIDTH), [Case(f"{name}@{MEGABYTES}", layers, None) for name in ("alone:none", *names)]
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.begin_round()
        for _ in range(WARM):
            case.run(inputs)
    for _ in range(turns):
        for case, mine in zip(cases, times, strict=True):
            mine.append(case.run(inputs))
    rows = [row(case, mine, times[0], inputs, cases[0]) for case, mine in zip(cases, times, strict=True)]
    for case, each in zip(cases[1:], rows[1:], strict=True):
        each["profile"] = shares(case, cases[0], inputs) if profiled else {}
    for case in cases:
        case.end_round()
    return rows[1:]


def row(case: Case, mine: list[float], alone: list[float], inputs: Tensor, bare: Case) -> dict[str, Any]:
    """The figures of a case. `least_us`: of the quickest steps, which other processes have not held up."""
    extra = statistics.median(own - other for own, other in zip(mine, alone, strict=True))
    few, least = (min(each.calls(inputs) for _ in range(5)) for each in (case, bare))  # some steps take samples
    found = (min(each.operators(inputs) for _ in range(5)) for each in (case, bare))
    operators, views = ((one - other) / BUCKETS for one, other in zip(*found, strict=True))
    NullKernel.launches = 0
    case.run(inputs)
    return {
        "case": case.name.partition("@")[0],
        "us": 1e6 * extra / BUCKETS,
        "least_us": 1e6 * (min(mine) - min(alone)) / BUCKETS,
        "calls": (few - least) / BUCKETS,
        "launches": NullKernel.launches / BUCKETS,
        "operators": operators,
        "views": views,
    }


def timed(function: Callable[[], object]) -> float:
    """Seconds of this thread that a function takes."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def driven(program: Program[Tensor], ranks: Ranks, measure: Callable[[Callable[[], object]], float]) -> float:
    """Run a program whose other ranks send the same, and add up what `measure` finds of its parts."""
    asked = list[Any]()

    def advance(reply: Tensor | None) -> None:
        asked.append(next_request(program, reply)[0])

    total = measure(partial(advance, None))
    while asked[-1] is not None:
        total += measure(partial(advance, alike(asked[-1], ranks)))
    return total


def shard_row(spec: str, ranks: int, turns: int) -> dict[str, Any]:
    """The figures of the reduction of a module's gradients by FSDP2."""
    layout, reduction = ShardLayout(replace(MODULE, ranks=Ranks(ranks)), (0, 0)), shard_sum(spec)
    state, out = reduction.init(layout), torch.zeros(layout.row)

    def measured(measure: Callable[[Callable[[], object]], float]) -> float:
        return driven(reduction.reduce(torch.ones(layout.numel), state, out), layout.whole.ranks, measure)

    seconds = [measured(timed) for _ in range(WARM + turns)][WARM:]
    case, calls = f"{spec} on {ranks} ranks", measured(counted)
    NullKernel.launches = 0
    measured(timed)
    us, least_us = 1e6 * statistics.median(seconds), 1e6 * min(seconds)
    return {"case": case, "us": us, "least_us": least_us, "calls": calls, "launches": NullKernel.launches}


def main() -> None:
    """Measure on this process alone."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of step_time.py, without megabytes")
    parser.add_argument("--shards", action="store_true", help="measure FSDP2's reductions in place of DDP's cases")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="show the N functions that take most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.cases or [*TORCH, *(f"gradwire:{case}" for case in CASES)]
    with null_device():
        if arguments.shards:
            rows = [shard_row(spec, ranks, arguments.turns) for spec in SHARDS for ranks in RANKS]
        else:
            rows = measured(names, arguments.turns, profiled=arguments.profile > 0)
    for each in rows:
        line = "{case:34} {us:7.0f} us {least_us:7.0f} us {calls:6.0f} calls {launches:4.0f} launches"
        line += " {operators:4.0f} operators {views:4.0f} views" if "views" in each else ""
        print(line.format(**each))
        for name, share in list(each.get("profile", {}).items())[: arguments.profile]:
            print(f"{share:12.0%} {share * each['us']:7.0f} us  {name}")
    write_results(arguments.json, {**about(), "turns": arguments.turns, "cases": rows})


if __name__ == "__main__":
    main()
