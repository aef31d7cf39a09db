"""What `make gpu` runs, in the order in which it tells most: each part a process of its own, with a verdict."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
FLOOR, LARGE_BUCKET = 0.85, 64_000_000  # of a copy's speed, from so many elements on
AGAINST_TOPK = 10.0  # times torch.topk
OVERHEAD = {"none": 1.01, "bf16": 1.01, "int8": 1.015, "int4": 1.015}  # times torch's step
HOST, HOST_OF_CODES = 0.15e-3, 0.5e-3  # seconds a bucket
CASES = ("none", "bf16", "int8", "int4", "powersgd:rank=4", "topk:ratio=0.01", "onebit")


@dataclass(frozen=True)
class Part:
    """`command`: its arguments for an output folder. `misses`: of a part that ended well, the goals it does not reach.

    `modules`: what must be installed, beside torch; `device`: whether it needs a GPU.
    """

    says: str
    command: Callable[[Path], list[str]]
    modules: tuple[str, ...] = ()
    misses: Callable[[Path], list[str]] = lambda _: []
    device: bool = True

    @property
    def missing(self):
        """What it needs and is not here."""
        modules = [f"{name} not installed" for name in self.modules if importlib.util.find_spec(name) is None]
        return modules + (["no CUDA device"] if self.device and not torch.cuda.is_available() else [])


def pytest_part(says, *arguments, dist="load", modules=("triton", "pytest"), **settings):
    """Tests, beside each other where pytest can. `dist`: xdist's way to spread them."""

    def command(out):
        workers = str(min(8, os.cpu_count() or 1))
        parallel = ["-n", workers, "--dist", dist] if importlib.util.find_spec("xdist") else []
        strict = [] if importlib.util.find_spec("pytest_timeout") else ["--override-ini", "addopts=-ra"]
        return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, *strict, *arguments]

    return Part(says, command, modules, **settings)


def info(out):
    """Versions, devices, backends."""
    code = (
        "import json, pathlib; from gradwire.experiments.info import collect; "
        f"pathlib.Path({str(out / 'info.json')!r}).write_text(json.dumps(collect(), indent=1))"
    )
    return [sys.executable, "-c", code]


def floors(out):
    """All operations, at the size of a bucket and at larger ones."""
    code = (
        "from gradwire.experiments.kernels.command import KernelsConfig, kernels_command as run; "
        f"raise SystemExit(run(KernelsConfig(sizes=['6.5536M', '64M', '256M'], seconds=0.05, all=True, device='cuda', "
        f"json={str(out / 'kernels.json')!r})))"
    )
    return [sys.executable, "-c", code]


def best_rows(out):
    """{(operation, elements): the row of the fastest backend}."""
    best = {}
    for row in json.loads((out / "kernels.json").read_text())["rows"]:
        key = row["operation"], row["elements"]
        if row["seconds"] and (key not in best or row["seconds"] < best[key]["seconds"]):
            best[key] = row
    return best


def slow_kernels(out):
    """Operations on large buckets that are far from a copy's speed, and a selection that is near torch.topk's."""
    found = []
    for (name, elements), row in best_rows(out).items():
        if elements < LARGE_BUCKET or name.startswith(("orthogonalize", "normalize")):
            continue
        if row["fraction_of_copy"] < FLOOR:
            found.append(f"{name} of {elements:,}: {row['fraction_of_copy']:.2f} of a copy's speed, goal {FLOOR}")
        if name == "select_largest" and row["baseline_seconds"] / row["seconds"] < AGAINST_TOPK:
            found.append(f"{name} of {elements:,}: {row['baseline_seconds'] / row['seconds']:.1f}x torch, goal 10x")
    return found


def steps(bound, megabytes, *more):
    """Step times of torch's DDP and ours."""
    cases = [f"torch:none@{megabytes}", f"torch:bf16@{megabytes}", f"torch:powersgd@{megabytes}"]
    cases += [f"gradwire:{case}@{megabytes}" for case in CASES]

    def command(out):
        result = ["--json", str(out / f"step-{bound}.json")]
        return [sys.executable, str(BENCHMARKS / "gpu_step.py"), bound, *cases, *more, *result]

    return command


def cases_of(out, bound):
    """Rows by case, without the size of its buckets."""
    rows = json.loads((out / f"step-{bound}.json").read_text())["cases"]
    return {row["case"].partition("@")[0]: row for row in rows}


def slow_steps(out):
    """Cases whose step takes longer, beside torch's, than its goal."""
    rows = cases_of(out, "gpu")
    found = {case: rows[f"gradwire:{case}"]["times_the_first"] for case in OVERHEAD}
    return [
        f"{case}: {found[case]:.3f}x of torch's step, goal {goal}"
        for case, goal in OVERHEAD.items()
        if found[case] > goal
    ]


def busy_hosts(out):
    """Cases that take the host longer than their goal."""
    rows = {case: row["extra_a_bucket_s"] for case, row in cases_of(out, "host").items()}
    found = {case: seconds for case, seconds in rows.items() if seconds is not None}
    goals = {case: HOST_OF_CODES if case.endswith(("int8", "int4")) else HOST for case in found}
    return [
        f"{case.removeprefix('gradwire:')}: {1000 * seconds:.2f} ms of the host a bucket, goal {1000 * goals[case]:g}"
        for case, seconds in found.items()
        if seconds > goals[case]
    ]


def profiles(out):
    """Where steps go."""
    cases = [f"gradwire:{case}@1" for case in CASES]
    return [sys.executable, str(BENCHMARKS / "gpu_profile.py"), "host", "torch:none@1", *cases]


def graphs(out):
    """A bucket's arithmetic launched, and replayed."""
    return [sys.executable, str(BENCHMARKS / "gpu_graph.py"), "--json", str(out / "graphs.json")]


def quality(out):
    """Losses of trainings with compression; the default compressors and budget."""
    kept = ["--folder", str(out / "quality"), "--json", str(out / "quality.json")]
    return [sys.executable, str(BENCHMARKS / "gpu_quality.py"), "--no-checkpoints", *kept]


def shared(checks):
    """Checks on several ranks that share the card; a later call goes on where one has ended."""
    return lambda out: [sys.executable, "-m", "tests.gpu.shared_card", checks, "--out", str(out)]


COMPILE = ("tests/kernels/test_triton_compile.py", "tests/kernels/test_cuda_compile.py")
TRITON, CUDA = "tests/kernels/test_triton_gpu.py", "tests/gpu/test_cuda_kernels.py"
REFERENCE = "those_of_the_reference"  # half of Triton's tests: without xdist all take too long for a part
DDP = ("tests/gpu/test_engine_cuda.py", "tests/gpu/test_ddp_cuda.py", "tests/gpu/test_overlap_cuda.py")
DDP += ("tests/gpu/test_shared_gpu.py", "tests/gpu/test_same_kernels_cuda.py", "tests/gpu/test_many_steps_cuda.py")
DDP += ("tests/gpu/test_memory_cuda.py", "tests/gpu/test_private_groups.py")
FSDP = ("tests/gpu/test_fsdp_cuda.py",)
ORDER = ("tests/gpu/test_late_replies.py", "tests/gpu/test_training_cuda.py", "tests/gpu/test_graph_cuda.py")

PARTS = {
    "info": Part("what there is", info, device=False),
    "shared-raw": Part("ranks of NCCL on one card: every collective", shared("raw")),
    "shared-trainings": Part("ranks of NCCL on one card: DDP against Gloo", shared("trainings")),
    "shared-changes": Part("ranks of NCCL on one card: swaps, overlap, checkpoints", shared("changes")),
    "shared-sharded": Part("ranks of NCCL on one card: FSDP2 and replicate", shared("sharded")),
    "shared-faults": Part("ranks of NCCL on one card: late, killed and ending ranks", shared("faults")),
    "shared-paced": Part("two ranks at 1 and 10 Gbit/s, beside torch's hooks", shared("paced")),
    "shared-open": Part("two and four ranks, beside torch's hooks", shared("open")),
    "compile": pytest_part(
        "kernels compile for GPUs that are not here", "-rP", *COMPILE, dist="loadfile", device=False
    ),
    "kernels": pytest_part("Triton's kernels against the reference", TRITON, "-k", REFERENCE),
    "repeats": pytest_part("Triton's kernels again, captured, of many elements", TRITON, "-k", f"not {REFERENCE}"),
    "cuda": pytest_part("CUDA's kernels against the reference", CUDA, modules=("pytest", "cupy")),
    "ddp": pytest_part("engine and DDP against torch's", *DDP),
    "fsdp": pytest_part("FSDP2 and replicate against the CPU", *FSDP),
    "order": pytest_part(
        "late replies, steps without waits, overflows, sparse and uneven inputs, captured steps", *ORDER
    ),
    "floors": Part("kernels against a copy's speed", floors, ("triton",), slow_kernels),
    "step": Part("a step bound by the GPU", steps("gpu", 25), misses=slow_steps),
    "host": Part("a step bound by the host", steps("host", 1), misses=busy_hosts),
    "profile": Part("where steps go", profiles),
    "graphs": Part("a bucket's arithmetic as CUDA graphs", graphs, ("triton",)),
    "quality": Part("losses with compression, on simulated ranks", quality),
}
GROUPS = {"shared": tuple(name for name in PARTS if name.startswith("shared-"))}  # one name for several parts
