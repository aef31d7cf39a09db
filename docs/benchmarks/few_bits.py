"""Validation losses of few bits per element: what exact parameters gain, and what Muon loses.

    python docs/benchmarks/few_bits.py exact-parameters
    python docs/benchmarks/few_bits.py few-bits-muon --tasks gpt-muon-400 --ways none "int4, core 4" --seeds 0
    python docs/benchmarks/few_bits.py few-bits-muon --table

The tasks are those of compressor_loss.py, of 120 or 400 steps: a GPT on four simulated ranks, with AdamW, or with Muon for
the blocks' matrices and AdamW for the rest. Muon computes in float32. Runs that the study's file has are skipped; `--table`
prints a table and runs nothing.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from compressor_loss import CPU, LONGER, MUON_LR, RANKS, Task, trained
from compressor_loss import TASKS as SHORT
from driver import parser_of
from finished_runs import FinishedRuns
from muon_feedback import DECAY, MATRICES, MOMENTUM
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gradwire.compress import Compressor, Layout, Program, Ranks, all_reduce, compressor, tuned
from gradwire.compress.algorithms.adapters import TwoShot
from gradwire.compress.algorithms.core import Core
from gradwire.compress.algorithms.dense import Dense
from gradwire.compress.algorithms.powersgd import PowerSGD
from gradwire.compress.algorithms.quantized import Int2, Int4, Int8, Quantized
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.compress.feedback.partition import Partition
from gradwire.compress.feedback.switch import Switch
from gradwire.compress.protocol.compressor import inside
from gradwire.compress.simulate import dry_run
from gradwire.experiments.bucket_plan import bucket_layouts
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.workloads.data import load_dataset
from gradwire.experiments.workloads.models import ModelConfig, build_model
from gradwire.experiments.workloads.muon import Muon
from gradwire.experiments.workloads.training import initial_model
from gradwire.kernels import Residual

ROOT = Path(__file__).parents[2]
VECTORS, EMBEDDINGS, HEAD = ("*bias", "*norm*"), ("tokens.*", "positions.*"), ("head.*",)
BLOCK, SCALE_BITS = 128, 32
QUARTERS = (0, 100, 200, 300)  # their first steps
SEEDS, MOST_SEEDS = range(3), 9  # by default, and that the table looks for
MUON_TASKS = ("gpt-muon", "gpt-muon-400", "gpt-muon-0.9m")

SIZES = {
    "0.14 M": LONGER["gpt-muon-400"].model,
    "0.9 M": LONGER["gpt-muon-0.9m"].model,
    "11 M": ModelConfig("gpt", width=384, layers=6, vocabulary=256, context=512),
    "124 M": ModelConfig("gpt", width=768, layers=12, vocabulary=50257, context=1024),
}


class Trial(Task):
    """A task whose Muon computes in float32, since products in bfloat16 are slow here."""

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers of a model: with Muon, AdamW beside it."""
        if self.optimizer != "muon":
            return super().optimizers(model)
        matrices = [each for each in model.blocks.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
        groups: Any = [group_of(each) for each in matrices]
        return [Muon(groups, MUON_LR, MOMENTUM), AdamW(others, self.lr)]


def group_of(matrix: nn.Parameter) -> dict[str, Any]:
    """Return a matrix with the learning rate and weight decay by which gradwire's Muon does as torch's at `MUON_LR`."""
    rows, columns = matrix.shape
    rate = MUON_LR * max(1.0, rows / columns) ** 0.5 / (0.2 * max(rows, columns) ** 0.5)
    return {"params": [matrix], "lr": rate, "weight_decay": DECAY * MUON_LR / rate}


TASKS = {name: Trial(**vars(task)) for name, task in (SHORT | LONGER).items() if name.startswith("gpt")}


@dataclass(frozen=True)
class Rounded:
    """A mean that ranks round before they send, and a server after it, by any function of a parameter.

    A trial of codes that no kernel has: numbers travel as floats, and `sent_bytes` counts what codes would take.
    """

    rounded: Callable[[Tensor], Tensor]
    bits: Callable[[torch.Size], int]

    def init(self, layout: Layout) -> tuple[Layout, Tensor]:
        """Return the layout and the server's residual, which all ranks compute alike."""
        return layout, torch.zeros(layout.numel)

    def reduce(self, grad: Tensor, state: tuple[Layout, Tensor], residual: Residual | None = None) -> Program[Tensor]:
        """Return the mean, in place of `grad`."""
        layout, server = state
        exact = grad if residual is None else residual.plus(grad)
        own = self._each(layout, exact)
        if residual is not None:
            residual.after.copy_(exact - own)
        mean = yield from all_reduce(own)
        if residual is not None:
            mean = mean + server
        grad.copy_(self._each(layout, mean))
        if residual is not None:
            server.copy_(mean - grad)
        return grad

    def _each(self, layout: Layout, flat: Tensor) -> Tensor:
        return torch.cat([self.rounded(view).reshape(-1) for view in layout.views(flat).values()])

    def sent_bytes(self, model: nn.Module) -> float:
        """Return the bytes that a rank sends per step: all parts but its own in the first round, and its own to all."""
        payload = sum(self.bits(each.shape) for each in model.parameters()) / 8
        return 2 * payload * (RANKS - 1) / RANKS


def in_blocks(bits: int) -> Rounded:
    """Return codes of so many bits with a scale per block."""
    half = 2 ** (bits - 1)

    def rounded(values: Tensor) -> Tensor:
        flat = values.reshape(-1)
        blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        return codes(blocks, blocks.abs().amax(1, keepdim=True) / half, half).view(-1)[: flat.numel()]

    return Rounded(rounded, lambda shape: bits * shape.numel() + SCALE_BITS * -(-shape.numel() // BLOCK))


def codes(values: Tensor, scale: Tensor, half: int) -> Tensor:
    """Return the nearest multiples of scales, by whole numbers below `half`."""
    return (values / scale.clamp(min=1e-30)).round().clamp(1 - half, half - 1) * scale


def by_rows(columns: bool) -> Rounded:
    """Return codes of 4 bits whose scale is the largest of a row, or the smaller one of its row's and its column's."""
    half = 8

    def rounded(values: Tensor) -> Tensor:
        matrix = values.reshape(len(values), -1) if values.dim() > 1 else values.view(1, -1)
        scale = matrix.abs().amax(1, keepdim=True)
        if columns and len(matrix) > 1:
            scale = torch.minimum(scale, matrix.abs().amax(0, keepdim=True))
        return codes(matrix, scale / half, half)

    def bits(shape: torch.Size) -> int:
        scales = (shape[0] + columns * shape[1:].numel()) if len(shape) > 1 else 1
        return 4 * shape.numel() + SCALE_BITS * scales

    return Rounded(rounded, bits)


def quantized(codec: Quantized, feedback: bool = True) -> TwoShot:
    """Return a codec as a compressor, whose servers have residuals with error feedback alone."""
    return TwoShot(codec, feedback)


def core(rank: int, codec: Quantized, where: Sequence[str] = (), feedback: bool = True) -> Compressor:
    """Return a core for all matrices, or for those named; vectors and other matrices have the codec alone."""
    rest = quantized(codec, feedback)
    both = Core(PowerSGD(rank, payload="int8"), rest)
    built = Partition(
        tuple((name, both) for name in where) or tuple((name, rest) for name in VECTORS), rest if where else both
    )
    return ErrorFeedback(built) if feedback else built


def exact(spec: str, *names: str) -> Callable[[Trial, nn.Module], Compressor]:
    """Return what builds a compressor with the optimizer's error feedback, and parameters that are sent uncompressed."""

    def build(task: Trial, model: nn.Module) -> Compressor:
        built: Any = compressor(tuned(spec, task.optimizers(model)))
        rules = tuple((name, Dense()) for name in names)
        if isinstance(built, ErrorFeedback):
            return dataclasses.replace(built, inner=Partition(rules, built.inner))
        return Partition(rules, built)

    return build


def feedback_of(codec: Quantized, matrices: bool) -> Compressor:
    """Return a codec with error feedback for Muon's matrices alone, or for all others alone."""
    own, others = (
        ErrorFeedback(quantized(codec)) if on else quantized(codec, False) for on in (matrices, not matrices)
    )
    return Partition(tuple((name, own) for name in MATRICES), others)


INT4, INT2 = Int4(), Int2()
LAST_IN_8 = ErrorFeedback(Switch({0: quantized(INT4), QUARTERS[-1]: quantized(Int8())}))
COMPRESSORS = ("int8", "int4", "int2", "topk", "onebit")
KEPT = {"": (), "vectors": VECTORS, "vectors, embeddings": VECTORS + EMBEDDINGS}
KEPT["vectors, embeddings, head"] = VECTORS + EMBEDDINGS + HEAD
Way = str | Compressor | Callable[[Trial, nn.Module], Compressor]
EXACT: dict[str, Way] = {"none": "none"} | {
    f"{spec}; exact: {kept}" if kept else spec: exact(spec, *names) if names else spec
    for spec, (kept, names) in product(COMPRESSORS, KEPT.items())
}
CORE: dict[str, Way] = {
    "none": "none",
    **{
        f"{name}{option}": f"{name}{option}"
        for name, option in product(("int4", "int2"), (":error_feedback=true", ":error_feedback=false"))
    },
    "int4:error_feedback=true,block=32": "int4:error_feedback=true,block=32",
    **{f"int4, core {rank}": core(rank, INT4) for rank in (2, 4, 8)},
    **{f"int4, core {rank} of Muon's matrices": core(rank, INT4, MATRICES) for rank in (4, 8)},
    **{f"int4, core {rank}, no error feedback": core(rank, INT4, feedback=False) for rank in (2, 4, 8)},
    "int4:error_feedback=0.7": "int4:error_feedback=0.7",
    "int4:error_feedback=true,rotate=true": "int4:error_feedback=true,rotate=true",
    "int4, Muon's matrices uncompressed": exact("int4:error_feedback=true", *MATRICES),
    "int4, Muon's matrices uncompressed, no error feedback": exact("int4:error_feedback=false", *MATRICES),
    "int4, error feedback of Muon's matrices": feedback_of(INT4, True),
    "int4, error feedback of all others": feedback_of(INT4, False),
    "int4, int8 from step 300": LAST_IN_8,
    **{f"int2, core {rank}": core(rank, INT2) for rank in (2, 4, 8)},
    **{f"int2, core {rank}, no error feedback": core(rank, INT2, feedback=False) for rank in (2, 4, 8)},
    **{f"{bits} bits": ErrorFeedback(in_blocks(bits)) for bits in (4, 5, 6)},
    "4 bits, a scale per row": ErrorFeedback(by_rows(False)),
    "4 bits, scales per row and column": ErrorFeedback(by_rows(True)),
}
STUDIES = {
    "exact-parameters": (
        EXACT,
        ("gpt-adamw", "gpt-muon", "gpt-adamw-400", "gpt-muon-400"),
        ("0.14 M", "11 M", "124 M"),
    ),
    "few-bits-muon": (CORE, (*MUON_TASKS, "gpt-adamw-400", "gpt-adamw-0.9m"), ("0.14 M", "0.9 M", "11 M")),
}


def result(way: Way, task: Trial, seed: int, dataset: Any) -> dict[str, Any]:
    """Train in one way. Return the bytes that a rank sent, and the validation loss."""
    model = initial_model(task.config(seed), dataset, CPU)
    built = way if isinstance(way, str | Compressor) else way(task, model)
    found = trained(built, task, seed, dataset)
    inner = getattr(built, "inner", None)
    sent = inner.sent_bytes(model) * task.steps if isinstance(inner, Rounded) else found["sent_bytes"]
    return {"sent_bytes": round(sent), "loss": found["loss"]}


@cache
def gpt(size: str) -> nn.Module:
    """Return a model of SIZES on no device. At 124 M its head is its embedding, as in GPT-2."""
    with torch.device("meta"):
        model = build_model(SIZES[size])
    if size == "124 M":
        model.head.weight = model.tokens.weight
    return model


def sent_per_step(way: Way, size: str) -> float:
    """Return the bytes that a rank sends per step in the mean of all quarters of a training, by dry runs."""
    model, task = gpt(size), TASKS[MUON_TASKS[0]]
    built = compressor(way) if isinstance(way, str | Compressor) else way(task, model)
    if isinstance(inner := getattr(built, "inner", None), Rounded):
        return inner.sent_bytes(model)
    layouts = bucket_layouts(dict(reversed([*model.named_parameters()])), 25, Ranks(RANKS), torch.device("meta"))
    steps = QUARTERS if any(isinstance(each, Switch) for each in inside(built)) else QUARTERS[:1]
    return statistics.fmean(sum(dry_run(built, layout, step).sent_bytes for layout in layouts) for step in steps)


def table(study: str, finished: FinishedRuns) -> Iterator[str]:
    """Yield the lines of a table: by size how many times fewer bytes a way sends, by task how far it ends above `none`."""
    ways, tasks, sizes = STUDIES[study]
    heads = [*(f"bytes, {size}" for size in sizes), *(f"`{task}`" for task in tasks)]
    yield f"| compressor | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for name, way in ways.items():
        losses = [shown(excess(pairs(name, task, finished))) for task in tasks]
        if study == "exact-parameters" or set(losses) != {"-"}:
            fewer = [f"{sent_per_step('none', size) / sent_per_step(way, size):.1f}x" for size in sizes]
            yield f"| {name} | {' | '.join([*fewer, *losses])} |"


def pairs(way: str, task: str, finished: FinishedRuns) -> list[tuple[Any, Any]]:
    """Return the finished runs of a way with a task, each beside that of `none`."""
    found = [
        (
            finished.find({"task": task, "way": way, "seed": seed}),
            finished.find({"task": task, "way": "none", "seed": seed}),
        )
        for seed in range(MOST_SEEDS)
    ]
    return [each for each in found if all(each)]


def excess(found: Sequence[tuple[Any, Any]]) -> list[float]:
    """Return per cent of loss above that of `none`, for each seed."""
    return [100 * (mine["loss"] / none["loss"] - 1) for mine, none in found]


def shown(values: Sequence[float]) -> str:
    """Return the mean of a figure of each seed with its 95 % interval, and the number of seeds if they are not three."""
    if not values:
        return "-"
    spread = f" ± {interval(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.1f}{spread}" + (f" ({len(values)})" if len(values) != len(SEEDS) else "")


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("study", choices=STUDIES, help="a folder of docs/results")
    parser.add_argument("--file", type=Path, help="of the runs, by default runs.json in the study's folder")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK")
    parser.add_argument("--ways", nargs="+", metavar="WAY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs, and run nothing")
    asked = parser.parse_args()
    ways, tasks, _ = STUDIES[asked.study]
    finished = FinishedRuns(asked.file or ROOT / "docs" / "results" / asked.study / "runs.json")
    if asked.table:
        print(*table(asked.study, finished), sep="\n")
        return
    torch.set_num_threads(1)
    for seed, task in product(asked.seeds, asked.tasks or tasks):
        dataset = load_dataset(TASKS[task].data, TASKS[task].model)
        for run in finished.missing({"task": task, "way": way, "seed": seed} for way in asked.ways or ways):
            finished.add(run, **result(ways[run["way"]], TASKS[task], seed, dataset))


if __name__ == "__main__":
    main()
