"""Bytes per parameter that data-parallel training takes beyond parameters and gradients.

    python memory.py torch:none own:none own:int4 views:int4 attach:int4 --json memory.json
    python memory.py local:none local:int4 --width 2048 --json memory.json
    python memory.py fsdp:none fsdp:int8/int8 fsdp:int8/int4 --json memory-fsdp.json

A case is HOW:COMPRESSOR. HOW is torch (torch's DDP with gradient_as_bucket_view=True; COMPRESSOR is none or its hook bf16),
own (gradwire's DDP, likewise), views (attach to torch's, likewise), attach (attach, without), fsdp (torch's fully_shard, a
matrix a group; COMPRESSOR is none, or those of gathers and reductions, such as int8/int4) or local (LocalSteps, a round
every 8 steps). Each case runs in two fresh processes over Gloo, without shared memory. The model has LAYERS matrices of
WIDTH x WIDTH in float32. Under fsdp each rank keeps half of the parameters and gradients.

With --json, the file's cases of an earlier call on the same model stay, but for those that are measured anew: so the cases
can be measured in pieces. MALLOC_MMAP_THRESHOLD_ has glibc give freed tensors back, without holes in its heap; it is 262144
unless the environment has another one.

`live` counts the tensors between two steps: exact, the same in every run. `peak` is the most resident memory within steady
steps. Both are the mean over ranks. `beyond torch` is the peak minus that of torch:none (of
fsdp:none for FSDP2), and `plan` what gradwire.plan says of both.
"""

import gc
import json
import multiprocessing
import os
import socket
from pathlib import Path
from queue import Empty

import torch
import torch.distributed as dist
from driver import parser_of, write_results
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.experiments.sharded_plan import plan_sharded
from gradwire.experiments.sites_plan import SitesPlan, Wan, round_plans
from gradwire.experiments.workloads.memory import peak_memory, reset_peak_memory

RANKS, LAYERS = 2, 16
STEPS = 3  # DDP rebuilds its buckets in the second one
EVERY, FRAGMENTS = 8, 4  # steps between two averages of a parameter by LocalSteps, and its parts
MEASURED = 8
CPU = torch.device("cpu")
SPECS = ["none", "bf16", "powersgd:rank=4", "topk", "onebit", "int8", "int4", "int2", "int4:residual_bits=8"]
CASES = [
    "torch:none",
    "torch:bf16",
    *(f"own:{spec}" for spec in SPECS),
    *(f"views:{spec}" for spec in SPECS),
    *(f"attach:{spec}" for spec in ("none", "bf16", "powersgd:rank=4", "int4")),
    *(f"fsdp:{spec}" for spec in ("none", "int8/int8", "int8/int4")),
    *(f"local:{spec}" for spec in ("none", "int4")),
]


def wrapped(case: str, model: nn.Module) -> nn.Module:
    """A model under DDP, as a case says."""
    how, spec = case.split(":", 1)
    if how == "fsdp":
        return sharded(model, spec)
    if how == "local":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.local = gradwire.LocalSteps(model, optimizer, every=EVERY, fragments=FRAGMENTS, compressor=spec)
        model.count_step = optimizer.step
        return model
    if how == "own":
        return gradwire.DistributedDataParallel(model, compressor=spec, gradient_as_bucket_view=True)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=how != "attach")
    if how == "torch" and spec == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif how != "torch":
        ddp.handle = gradwire.attach(ddp, spec)
    return ddp


def sharded(model: nn.Module, spec: str) -> nn.Module:
    """A model under fully_shard; `spec`: none, or the compressors of gathers and of reductions."""
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if spec != "none":
        gather, reduce = spec.split("/")
        model.handle = gradwire.attach(model, gather=gather, reduce=reduce)
    return model


def step(model: nn.Module) -> None:
    """One step of gradient descent, which needs no memory of its own. Gradients stay."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs = torch.randn(4, getattr(model, "module", model)[0].in_features)
    model(inputs).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)
    getattr(model, "count_step", lambda: None)()


def trained(case: str, width: int) -> nn.Module:
    """A model of a case, after its first steps."""
    model = wrapped(case, nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))))
    for _ in range(STEPS):
        step(model)
    return model


def live_bytes() -> int:
    """Bytes of all tensors that Python knows, each memory once."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and not each.is_sparse]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


def measured(case: str, width: int) -> tuple[int, int, int]:
    """Bytes on this rank: live between two steps, at peak within steps, both beyond what there was; and parameters."""
    trained(case, 64)  # what the first training of a process takes, whatever its size
    reset_peak_memory(CPU)
    live, peak = live_bytes(), peak_memory(CPU)
    model = trained(case, width)
    reset_peak_memory(CPU)
    for _ in range(MEASURED):
        step(model)
    elements = sum(parameter.numel() for parameter in model.parameters())
    return live_bytes() - live, peak_memory(CPU) - peak, elements


def run(rank: int, port: int, case: str, width: int, results: "multiprocessing.Queue[tuple]") -> None:
    """One rank of a case."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    results.put(measured(case, width))
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # nothing of the end belongs to the measurement


def per_parameter(case: str, width: int) -> dict[str, float]:
    """Bytes per parameter beyond parameters and gradients, the mean over ranks."""
    context = multiprocessing.get_context("forkserver")  # has imported torch already
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    ranks = [context.Process(target=run, args=(rank, port, case, width, results)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    found: list[tuple[int, int, int]] = []
    while len(found) < RANKS:
        try:
            found.append(results.get(timeout=1))
        except Empty:
            if any(each.exitcode for each in ranks):
                raise RuntimeError(
                    f"a rank of {case} ended early: is there enough memory? Try a smaller --width"
                ) from None
    for each in ranks:
        each.join()
    there = 8 / RANKS if case.startswith("fsdp:") else 8  # parameters and gradients
    return {
        name: round(sum(rank[place] / rank[2] for rank in found) / RANKS - there, 2)
        for place, name in enumerate(("live", "peak"))
    }


def planned(case: str, width: int) -> dict[str, float]:
    """What `gradwire plan` computes for a case, beyond what training without gradwire takes; nothing for other cases."""
    how, spec = case.split(":", 1)
    weights = {str(layer): torch.empty(width, width, device="meta") for layer in range(LAYERS)}
    elements = LAYERS * width**2
    if how in ("own", "views"):
        plan = gradwire.plan(nn.ParameterDict(weights), spec, world_size=RANKS)
    elif how == "fsdp" and spec != "none":
        plan = plan_sharded([{name: each} for name, each in weights.items()], *spec.split("/"), world_size=RANKS)
    elif how == "local":
        plan = SitesPlan(EVERY, round_plans(gradwire.compressor(spec), weights, Wan(RANKS, 1.0, 1.0), FRAGMENTS), 1.0)
    else:
        return {}
    state, peak = plan.state_bytes / elements, (plan.state_bytes + plan.work_bytes) / elements
    return {"plan live": round(state, 2), "plan peak": round(peak, 2)}


def main() -> None:
    """Measure all cases, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="HOW:COMPRESSOR")
    parser.add_argument("--width", type=int, default=1024, help="of the matrices; 2048 for 67 M parameters")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    os.environ["GRADWIRE_SHARED_MEMORY"] = "0"
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "262144")
    of = {"ranks": RANKS, "parameters": LAYERS * given.width**2, "torch": torch.__version__}
    found = earlier(given.json, of)
    for case in given.cases:
        found[case] = per_parameter(case, given.width) | planned(case, given.width)
        write_results(given.json, of | {"cases": beyond_torch(found)})
    columns = ["live", "peak", "beyond torch", "plan live", "plan peak"]
    table = Table("case", *columns, title="bytes per parameter beyond parameters and gradients")
    for case, numbers in beyond_torch(found).items():
        table.add_row(case, *(f"{numbers[name]:.2f}" if name in numbers else "" for name in columns))
    Console().print(table)


def earlier(path: Path | None, of: dict[str, object]) -> dict[str, dict[str, float]]:
    """The cases of a file, if they were measured with the same ranks, model and torch."""
    saved = json.loads(path.read_text()) if path and path.exists() else {}
    return saved["cases"] if saved and of == {name: saved.get(name) for name in of} else {}


def beyond_torch(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The cases, with the difference of each peak to that of torch in the same form of training, where it is among them."""
    for case, numbers in found.items():
        torchs = found.get("fsdp:none" if case.startswith("fsdp:") else "torch:none")
        if torchs:
            numbers["beyond torch"] = round(numbers["peak"] - torchs["peak"], 2)
    return found


if __name__ == "__main__":
    main()
