"""`gradwire plan`: what each compressor would send for a model, and how long a step would take, without training it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from ..compress import Ranks, compressor
from ..compress.builder.optimizer_defaults import tuned_specification
from ..compress.protocol.requests import Request
from ..compress.simulate import Traffic, traffic
from ..compress.state.shares import ranks_given
from .advice.predict import Prediction
from .advice.rule import wide
from .bucket_plan import Plan, plan
from .ddp_step import GpuStep, layered, model_step, predicted_step
from .optimizer_plan import matrices_of_blocks, muon_requests, optimizer_elements, stand_in
from .plan_advice import Advice, simplest, with_ddp
from .plan_config import BUSES, DTYPES, PlanConfig, counted
from .sharded_plan import plan_sharded
from .sharded_step import network_seconds, predicted_shards
from .sites_lines import MEMORY, memory_cells, plan_for_sites
from .workloads.data import data_shape
from .workloads.models import build_model
from .workloads.sharding import TORCH, parts, payloads, tuned_payloads
from .workloads.training import loss_of

SHOWN = ["compressor", "payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio"]
SHOWN += ["state_bytes", "work_bytes", "bytes_per_parameter"]
SOON = 1e-9  # seconds of a computation that hides nothing
RUN_AT_MOST = 2**26  # parameters: one backward of a larger model is traced on the meta device, at no cost


def plan_command(config: PlanConfig) -> int:
    """Print the plan; the command's exit code."""
    if config.sites:
        return plan_for_sites(config)
    model, order, config = _traced(config)
    plans = [_planned(model, order, spec, config) for spec in config.specs]
    steps = _steps(model, order, config) if config.timed else []
    if config.beside_ddp:
        plans, steps = _beside_ddp(model, order, plans, steps, config)
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.json:
        rows = [{name: getattr(each, name) for name in SHOWN} for each in plans]
        for row, times in zip(rows, _times(steps, config), strict=False):
            row.update(times)
        about = {"model": config.subject, "parameters": elements, "world_size": config.ranks}
        if config.optimizer:
            about["whole_bytes"] = sum(_whole_bytes(model, config).values())
        print(json.dumps({**about, "rows": rows}, indent=2))
        return 0
    console = Console()
    console.print(_table(config, elements, plans, steps))
    if steps:
        torchs = ""
        if config.parallel == "fsdp" and config.step_seconds and TORCH not in config.specs:
            torchs = f" Its step takes {_milliseconds(steps[0].step)}."
        console.print(NOTE, HIDDEN[config.parallel] + torchs, soft_wrap=True)
    if not (steps or config.optimizer or config.local_every) and any("int4" in each.compressor for each in plans):
        console.print(WITHOUT_OPTIMIZER, soft_wrap=True)
    if config.optimizer:
        console.print(_memory_note(model, order, plans, config), soft_wrap=True)
    if config.parallel == "fsdp" and config.optimizer == "muon":
        console.print(MUON, soft_wrap=True)
    if config.bus in BUSES:
        console.print(THROUGH_HOST.format(f"{int(BUSES[config.bus].removesuffix('gbit')) // 2}gbit"), soft_wrap=True)
    if config.shared_card:
        hybrid = [] if config.parallel == "ddp" else [ONE_MESH, HYBRID[config.optimizer == "muon"]]
        console.print(SHARED[config.bus is None], *_rings(model, order, config), *hybrid, soft_wrap=True)
    if elements > SMALL and any("powersgd" in spec for spec in config.specs):
        console.print(LOW_RANK, soft_wrap=True)
    if config.advised:
        advice = Advice(config, partial(_steps, model, order), sum(_whole_bytes(model, config).values()))
        console.print(advice.text, soft_wrap=True, markup=False, highlight=False)
    return 0


HIDDEN = {
    "ddp": "if two thirds of a micro-batch's computation are backward, which hides communication. Latency is left out. On "
    "emulated networks, the gain of int8 and int4 over bf16 was 0.7x to 1.1x of the predicted one: measure yours by try.",
    "fsdp": "if a module's computation hides the weights of the next one and the gradients of the one before. Latency is "
    "left out, and no compressed step of FSDP2 was measured on several GPUs. A speed-up of 1.00x is torch's FSDP2 without "
    "gradwire.",
}
LOW_RANK = (
    "PowerSGD: with 128 million parameters, powersgd:rank=32,payload=int4 ended 27.3 % above the loss of none, after 400 "
    "steps. Do not take PowerSGD above 20 million parameters."
)
SMALL = 20e6  # parameters
WITHOUT_OPTIMIZER = (
    "state: that of int4 is its residual, as with Muon or SGD. With an Adam alone as optimizer= it keeps none: add "
    "--optimizer adamw."
)
MUON = (
    "Rows of FSDP2 contain the bytes that the step of torch's Muon sends, uncompressed. With DDP and replicate() each rank "
    "has the whole model, and Muon's step sends nothing. replicate() sends as much as DDP, and computes longer."
)
SHARED = (
    "NCCL is assumed to sum in trees. In rings it sends up to twice as much through a host's card.",
    "NVLink inside a host is assumed (without it, add --bus pcie4x16), and that NCCL sums in trees. In rings it sends up to "
    "twice as much through a host's card.",
)
THROUGH_HOST = (
    "If `gradwire info` counts pairs of GPUs that reach each other through host memory, each byte crosses the bus twice: "
    "take --bus {}."
)
ONE_MESH = (
    "Rows of FSDP2 are for one mesh of all ranks. Their reductions without hosts+ are all-to-alls, which a host's card "
    "carries once for each of its GPUs."
)
HYBRID = (
    'With hybrid sharding and replicas="int8", hosts send as many bytes as with DDP and hosts+int8.',
    "With hybrid sharding Muon's step sends between hosts, too, which is not counted here: take DDP, replicate() or AdamW.",
)
HEADINGS = {
    "network_seconds": "network",
    "network_ratio": "network speed-up",
    "saves_at_most_seconds": "saves at most",
    "step_seconds": "step",
    "speed_up": "speed-up",
}
NOTE = """network: the least time that a step's bytes take on it, with all ranks of a host. network speed-up: that time \
of a step without gradwire over it. saves at most: against the \
bytes without gradwire, if computation hides nothing.
step, speed-up: with encoding,"""


def _rings(model: nn.Module, order: Sequence[Tensor], config: PlanConfig) -> Iterator[str]:
    """Yield the speed-ups of a step with DDP if NCCL sums in rings."""
    if config.step_seconds:
        ddp = config if config.parallel == "ddp" else _of_ddp(model, order, config)
        before, *steps = _steps(model, order, ddp, rings=True)
        rows = zip(ddp.specs, steps, strict=True)
        faster = ", ".join(f"{spec} {before.step / each.step:.2f}x" for spec, each in rows if spec != "none")
        step = "a step" if config is ddp else "a step of DDP"
        over = "" if config is ddp else " over it"
        yield f"Then {step} without gradwire takes {_milliseconds(before.step)}, and the speed-ups{over} are: {faster}."
        yield "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints which of the two it takes."


def _of_ddp(model: nn.Module, order: Sequence[Tensor], config: PlanConfig) -> PlanConfig:
    """Return the plan of the same hosts with DDP, and the compressors to try there."""
    ddp = with_ddp(config)
    return replace(ddp, compressors=["none", *simplest(ddp, partial(_steps, model, order))])


def _steps(model: nn.Module, order: Sequence[Tensor], config: PlanConfig, *, rings: bool = False) -> list[Prediction]:
    """The steps without gradwire and with each compressor. `rings`: NCCL sums in rings, not in trees."""
    if config.parallel == "fsdp":
        modules, seconds = _modules(model, config), config.step_seconds or SOON
        cluster, how = config.cluster, (config.policy, config.micro_batches)
        found = [predicted_shards(modules, cluster, spec, seconds, *how) for spec in (TORCH, *config.specs)]
        muon = network_seconds(_muon_requests(model, config), cluster)
        return [replace(each, step=each.step + muon, network=each.network + muon) for each in found]
    computation = (config.step_seconds or SOON) / config.micro_batches
    cluster = replace(config.cluster, rings=rings)
    step = GpuStep(*model_step(model, order), computation, micro_batches=config.micro_batches)
    return [predicted_step(step, cluster, spec, config.bucket_mb) for spec in ("none", *config.specs)]


def _beside_ddp(
    model: nn.Module, order: Sequence[Tensor], plans: Sequence[Plan], steps: Sequence[Prediction], config: PlanConfig
) -> tuple[list[Plan], list[Prediction]]:
    """Add what Muon's step sends to plans of shards. Behind them come plans and steps of DDP, where it sends nothing."""
    muon = sum((traffic(each, Ranks(config.ranks)) for each in _muon_requests(model, config)), Traffic())
    before = plans[0].compression_ratio * plans[0].sent_bytes_per_step + muon.sent_bytes
    ddp = _of_ddp(model, order, config)
    whole = [_planned(model, order, spec, ddp) for spec in ddp.specs]
    every = [
        replace(
            each,
            payload_bytes_per_step=each.payload_bytes_per_step + muon.payload_bytes,
            sent_bytes_per_step=each.sent_bytes_per_step + muon.sent_bytes,
        )
        for each in plans
    ] + [replace(each, compressor=f"DDP {each.compressor}") for each in whole]
    sent = [each.sent_bytes_per_step for each in every]
    plans = [replace(each, compression_ratio=before / of if of else 1.0) for each, of in zip(every, sent, strict=True)]
    return plans, [*steps, *(_steps(model, order, ddp)[1:] if steps else [])]


def _muon_requests(model: nn.Module, config: PlanConfig) -> list[Request]:
    """Return what a step of torch's Muon sends between shards."""
    matrices = matrices_of_blocks(_named(model, config)) if config.optimizer == "muon" else []
    return list(muon_requests(matrices, config.ranks))


def _named(model: nn.Module, config: PlanConfig) -> dict[str, Tensor]:
    return {name: each for part in _modules(model, config) for name, each in part.items()}


def _whole_bytes(model: nn.Module, config: PlanConfig) -> dict[str, int]:
    """Return the bytes of a rank that has the whole model, without compression and activations; of AdamW if none is named.

    DDP has the model in the dtype of its gradients. FSDP2 and `replicate()` keep weights, gradients and optimizer in float32
    under any policy. What forward casts takes no more than the gradients that replace it.
    """
    named, optimizer = _named(model, config), config.optimizer or "adamw"
    elements = sum(each.numel() for each in named.values())
    states = "Muon on the blocks' matrices and AdamW on the rest" if optimizer == "muon" else optimizer
    counts = {"weights": elements, "gradients": elements, states: optimizer_elements(named, optimizer)}
    dtype = torch.float32 if config.parallel == "fsdp" else config.policy.reduce_dtype
    return {name: dtype.itemsize * count for name, count in counts.items()}


def _memory_note(model: nn.Module, order: Sequence[Tensor], plans: Sequence[Plan], config: PlanConfig) -> str:
    """Say what a rank keeps before activations, and what compression adds to that.

    With Muon, 4 bits are not recommended, so only the compressors to try count.
    """
    dtype, steps = config.policy.reduce_dtype, partial(_steps, model, order)
    named = set(filter(wide, simplest(config, steps))) if config.optimizer == "muon" else set()
    tried = [each for each in plans if each.compressor.removeprefix("DDP ") in named]
    most = max(tried or plans, key=lambda each: each.peak_bytes)
    adds = (
        "Of the compressors to try, {1} adds the most within a step, {0}"
        if tried
        else "Compression adds at most {0} within a step, with {1}"
    )
    sizes = _whole_bytes(model, config)
    whole = sum(sizes.values())
    parts = ", ".join(f"{name} {size / plans[0].parameters:.1f}" for name, size in sizes.items())
    note = f"Memory of a rank before activations: {decimal(whole)} with "
    if config.parallel == "fsdp":
        sharded = decimal(whole // config.ranks)
        way = "DDP or replicate()" if dtype == torch.float32 else "replicate(), whose bytes rows of DDP have"
        note += (
            f"{way}, with float32 weights under any policy (bytes per parameter: {parts}); {sharded} with FSDP2, and whole "
            "modules in use. "
        )
    elif dtype == torch.float32:
        note += f"DDP or replicate() (bytes per parameter: {parts}). "
    else:
        kept = decimal(torch.float32.itemsize // dtype.itemsize * whole)
        words = str(dtype).removeprefix("torch.")
        note += (
            f"DDP and {words} weights (bytes per parameter: {parts}); {kept} with replicate(), which keeps float32. "
        )
    return (
        f"{note}{adds.format(decimal(most.peak_bytes), most.compressor)}, by computation; up to half more was measured."
    )


def _times(steps: Sequence[Prediction], config: PlanConfig) -> Iterator[dict[str, float]]:
    """Yield the times of each compressor, in seconds. The first of the steps is that without gradwire."""
    for each in steps[1:]:
        network = each.network / (config.local_every or 1)
        ratio = steps[0].network / network if network else 1.0  # one host sends nothing through its card
        row = {"network_seconds": network, "network_ratio": ratio}
        row["saves_at_most_seconds"] = max(0.0, steps[0].network - network)
        if config.step_seconds is not None:
            row |= {"step_seconds": each.step, "speed_up": steps[0].step / each.step}
        yield row


def _traced(config: PlanConfig) -> tuple[nn.Module, list[Tensor], PlanConfig]:
    """The model, its parameters in the order in which backward makes their gradients ready, and the options with the dtype.

    With DDP a model of the user's file has its own dtype, unless one is named. Raises ValueError where it has none to plan.
    """
    if config.parameters is not None:
        model = _transformer(counted(config.parameters)).to(config.policy.reduce_dtype)
        return model, list(model.parameters()), config
    if config.model.own:
        model = build_model(config.model)
        trained: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
        if config.dtype is None and config.parallel == "ddp" and trained:
            config = replace(config, dtype=_dtype_of(trained))
        return model.to(config.policy.reduce_dtype), trained[::-1], config  # to "meta" would part what is tied
    data = data_shape(config.data, config.model) if config.data else None
    sample = data_shape(config.data, config.model)
    with torch.device("meta"):
        elements = sum(p.numel() for p in build_model(config.model, data).parameters())
    with torch.random.fork_rng(), torch.device("cpu" if elements <= RUN_AT_MOST else "meta"):
        model = build_model(config.model, data)
        inputs, targets = sample.example(2)
        order = ready_order(model, lambda: loss_of(model, inputs, targets))
    return model.to(config.policy.reduce_dtype), order, config


def _dtype_of(parameters: Sequence[Tensor]) -> str:
    """The name of the dtype of all parameters. Raises ValueError where there are several, or another one."""
    found = {each.dtype for each in parameters}
    for name, dtype in DTYPES.items():
        if found == {dtype}:
            return name
    kinds = ", ".join(sorted(str(each).removeprefix("torch.") for each in found))
    raise ValueError(
        f"a plan has gradients of one dtype, and the model trains parameters of {kinds}: add --dtype fp32 or bf16"
    )


def _transformer(parameters: int) -> nn.Module:
    """The parameters of a transformer, as backward makes them ready."""
    model = nn.Module()
    for name, each in layered(parameters).items():
        model.register_parameter(name.replace(".", "_"), nn.Parameter(each))
    return model


def _planned(model: nn.Module, order: Sequence[Tensor], spec: str, config: PlanConfig) -> Plan:
    optimizers = stand_in(config.optimizer) if config.optimizer else None
    if config.parallel == "fsdp":
        modules, ranks = _modules(model, config), config.cluster.ranks
        sent = "none" if spec == TORCH else spec  # the same bytes
        pair = payloads(sent if optimizers is None else tuned_payloads(sent, optimizers))
        planned = plan_sharded(
            modules,
            *pair,
            world_size=ranks.world_size,
            ranks_per_host=ranks.per_host,
            policy=config.policy,
            micro_batches=config.micro_batches,
        )
        return replace(planned, compressor=spec, work_bytes=0 if spec == TORCH else planned.work_bytes)
    per_host = config.gpus_per_host if ranks_given(compressor(spec)) is not None else 1
    own = tuned_specification(spec, optimizers)
    whole = plan(model, own, world_size=config.ranks, bucket_mb=config.bucket_mb, order=order, ranks_per_host=per_host)
    return _spread(replace(whole, compressor=spec), config)


def _modules(model: nn.Module, config: PlanConfig) -> list[dict[str, Tensor]]:
    """The parameters of each module that is sharded, the root behind the others; of a number of parameters, the layers."""
    if config.parameters is None:
        return parts(model)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, each in layered(counted(config.parameters)).items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = each
    return [*(inside for name, inside in modules.items() if name), modules.get("", {})]


def _spread(whole: Plan, config: PlanConfig) -> Plan:
    """A step's part of what is averaged once in `local_every` steps."""
    steps = config.local_every or 1
    return replace(
        whole,
        payload_bytes_per_step=round(whole.payload_bytes_per_step / steps),
        sent_bytes_per_step=whole.sent_bytes_per_step / steps,
        compression_ratio=whole.compression_ratio * steps,
    )


def _table(config: PlanConfig, elements: int, plans: list[Plan], steps: Sequence[Prediction]) -> Table:
    local = f" of {config.local_every} local ones" if config.local_every else ""
    table = Table(title=f"{config.subject}: {elements:,} parameters on {config.ranks} ranks, a step{local}")
    table.add_column("compressor", no_wrap=True, min_width=max(len(each.compressor) for each in plans))
    memory = () if config.local_every or steps else MEMORY  # local SGD has state of its own
    times = [_shown_times(each) for each in _times(steps, config)] or [{}] * len(plans)
    counts = ("sent by a rank",) if steps else ("payload of a rank", "sent by a rank", "ratio")
    for heading in (*counts, *times[0], *memory):
        table.add_column(heading, justify="right")
    for each, shown in zip(plans, times, strict=True):
        payload, sent = decimal(each.payload_bytes_per_step), decimal(round(each.sent_bytes_per_step))
        kept = () if not memory else memory_cells(each.state_bytes, each.work_bytes, each.parameters)
        bytes_ = (sent,) if steps else (payload, sent, f"{each.compression_ratio:.2f}")
        table.add_row(each.compressor, *bytes_, *shown.values(), *kept)
    return table


def _shown_times(row: Mapping[str, float]) -> dict[str, str]:
    """The columns of times. The ratio is of times, since ranks may share a network card."""
    return {
        HEADINGS[name]: f"{value:.2f}x" if name in ("speed_up", "network_ratio") else _milliseconds(value)
        for name, value in row.items()
    }


def _milliseconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.{1 + (seconds < 10)}f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.3g} ms"


def ready_order(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The parameters in the order in which one backward of `loss()` makes their gradients ready; unused ones last."""
    ready: list[Tensor] = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(ready.append) for p in parameters]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
    seen = set(map(id, ready))
    return ready + [p for p in reversed(parameters) if id(p) not in seen]
