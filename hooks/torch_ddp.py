"""gradwire on torch's DistributedDataParallel."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress import Optimizers, Spec, tuned
from ..compress.builder.spelling import nearest_named
from ..ddp_core import (
    Decorator,
    Handle,
    Scaler,
    refuse_inside,
    refuse_parts,
    trained_now,
)
from ..ddp_core import DistributedDataParallel as OwnDDP
from ..ddp_core.measure.step import Step
from .backwards import ModelHook
from .handle_of import remember
from .model_kinds import ddp_inside, is_replicated, is_sharded, refuse_mixed
from .torch_ddp_checks import Guard, NeverCalled
from .torch_steps import BY_REDUCER, ByForward, ByIndex

if TYPE_CHECKING:
    from .fsdp import ShardHandle

logger = logging.getLogger(__name__)
WORTH_SAYING = 10.0  # MB
NOT_DDP = {  # class: what to do there
    "DataParallel": "it is one process, whose gradients reach no other. Wrap its module in DistributedDataParallel instead, "
    "and start one process per GPU: torchrun --nproc-per-node 4 train.py",
    "FullyShardedDataParallel": "FSDP shards gradients by itself, and FSDP1 lets nobody else do so: use fully_shard, or DDP",
    "PreTrainedModel": "transformers' Trainer wraps it when training begins: trainer.add_callback(GradwireCallback(trainer, "
    "...)) of gradwire.transformers attaches to trainer.model_wrapped then; without Trainer, wrap it first, then attach",
    "torch.distributed._composable.replicate.DDP": "its replicate() has a DDP model of its own: call "
    "model.register_comm_hook(None, gradwire.comm_hooks.int8) before the first forward, or use the replicate() of "
    "torch.distributed._composable.replicate_with_fsdp, which gradwire supports from torch 2.10 on",
}
HOOKED = (
    "the DDP model has a communication hook already, and torch takes one alone: to change the compressor, call swap() of "
    "its handle; after close(), wrap the model anew in DistributedDataParallel"
)
OF_SHARDS = (
    "an FSDP2 model has process groups of its own, and compresses weights and gradients: attach(fsdp_model, gather='int8', "
    "reduce='int8', optimizer=optimizer)"
)
if torch.__version__.startswith("2.9."):
    OF_SHARDS += ". In torch 2.9 replicate() makes an FSDP2 model, too: upgrade to torch 2.10"
PYTHON_REDUCER = (
    "torch's DDP was made under torch._dynamo.config.optimize_ddp='python_reducer', where communication hooks get no "
    "buckets: set it to 'ddp_optimizer', torch's default, before the model is wrapped, and leave compiled autograd off"
)


@torch._disable_dynamo  # where a compiled function calls backward
def compress_bucket(state: Handle, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook itself, for `DistributedDataParallel.register_comm_hook(handle, compress_bucket)`.

    It begins a step with the first bucket of each, unless gradwire's DDP does. The future holds the bucket's buffer.
    """
    averager = state.averager
    ours = averager.begun_by_reducer and not isinstance(bucket, dist.GradBucket)
    detector = BY_REDUCER if ours else state.step_detector
    if detector is None:
        detector = state.step_detector = ByIndex()
    if state.guard is not None and not state.guard(bucket):
        state.guard = None
    if detector.begins(bucket) or averager.step.number == 0:
        averager.begin_step(Step())
        if not detector.last_ends:
            detector.begun(averager.steps)
    average = averager.average_hooked(bucket)
    if bucket.is_last() or not detector.last_ends:  # else one more bucket comes, behind which this one goes on
        averager.engines.send_all()
    if bucket.is_last() and detector.last_ends:
        averager.steps.all_sent()
    return average.future


@overload
def attach(
    model: nn.Module,
    compressor: Spec,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: Decorator | None = None,
    optimizer: Optimizers | None = None,
    scaler: Scaler | None = None,
    undo: bool = False,
) -> Handle: ...


@overload
def attach(
    model: nn.Module,
    *,
    gather: Spec | None = None,
    reduce: Spec | None = None,
    replicas: Spec | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: Decorator | None = None,
    optimizer: Optimizers | None = None,
    scaler: Scaler | None = None,
    undo: bool = False,
) -> "ShardHandle": ...


@nearest_named
def attach(
    model: nn.Module,
    compressor: Spec | None = None,
    *,
    gather: Spec | None = None,
    reduce: Spec | None = None,
    replicas: Spec | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: Decorator | None = None,
    optimizer: Optimizers | None = None,
    scaler: Scaler | None = None,
    undo: bool = False,
) -> "Handle | ShardHandle":
    """Compress the gradients of a model: `handle = attach(ddp_model, "int8", optimizer=optimizer)`.

    All ranks call it before the first backward, with the same arguments. The DDP model may be inside of what
    torch.compile, Lightning Fabric or Accelerate have made of it. FSDP2 takes two compressors: `attach(fsdp_model,
    gather="int8", reduce="int8", optimizer=optimizer)`.

    Args:
        model: a model of torch's DistributedDataParallel, `fully_shard` (FSDP2) or `replicate`.
        compressor: the compressor of the gradients, for DDP and `replicate`. See `gradwire.compressor`.
        gather: the compressor of weights that FSDP2 gathers; "none" sends them uncompressed.
        reduce: the compressor of gradients that FSDP2 reduces.
        replicas: the compressor of gradients between the replicas of FSDP2's hybrid sharding.
        process_group: the ranks that average; by default the model's own group.
        timeout: limit of each wait for an average, on the CPU; by default that of the process group.
        transport: a function that wraps each transport, for example in an emulated link.
        optimizer: the optimizer of the averages, or a list. It sets the options of error feedback that `compressor`
            leaves open.
        scaler: a torch.amp.GradScaler. Residuals follow its loss scale: see `Handle.follow`.
        undo: keep a second copy of residuals, which doubles their memory. A step that GradScaler skips or that you
            discard is then undone exactly. Without the copy, the default, such a step sets residuals to zero.

    Returns:
        A `Handle`; for an FSDP2 model a `ShardHandle`.

    Raises:
        TypeError: the model is not DDP, FSDP2 or `replicate`, or an argument belongs to another kind of model.
        ValueError: a compressor is unknown or has a wrong option.
        RuntimeError: the DDP model has a communication hook already.
    """
    handle: Handle | ShardHandle
    if isinstance(model, nn.Module):
        refuse_mixed(model)
    if isinstance(model, nn.Module) and is_sharded(model) and not is_replicated(model):
        from .fsdp import Sharding, attach_sharded

        if compressor is not None or process_group is not None:
            raise TypeError(OF_SHARDS)
        handle = attach_sharded(model, Sharding(gather, reduce, replicas, optimizer, undo), timeout, transport)
    else:
        options: dict[str, Any] = {"process_group": process_group, "timeout": timeout, "transport": transport}
        options["undo"] = undo
        handle = _attach_whole(model, compressor, (gather, reduce, replicas), options, optimizer)
    if scaler is not None:
        handle.follow(scaler)
    model.register_forward_pre_hook(ModelHook(handle.forward_begins))
    return handle


def _attach_whole(
    model: nn.Module,
    spec: Spec | None,
    of_shards: tuple[Spec | None, ...],
    options: Mapping[str, Any],
    optimizer: Optimizers | None,
) -> Handle:
    """Compress the gradients of a model that each rank has as a whole: of DDP, or of `replicate`."""
    replicated = isinstance(model, nn.Module) and is_replicated(model)
    ddp = ddp_inside(model) if isinstance(model, nn.Module) else None
    if ddp is None and not replicated:
        raise TypeError(
            f"attach needs a model wrapped in torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}: "
            f"{_way_out(model)}"
        )
    if spec is None or any(each is not None for each in of_shards):
        raise TypeError(
            f"a {'DDP' if ddp else 'replicated'} model takes a compressor, attach(model, 'int8'); gather, reduce and "
            "replicas are FSDP2's"
        )
    if ddp is None:
        from .replicate import attach_replicated

        replicated_handle: Handle = attach_replicated(model, tuned(spec, optimizer), **options)
        trained: dict[Tensor, str] = {each: name for name, each in model.named_parameters() if each.requires_grad}
        replicated_handle.suit(optimizer, trained, spec)
        remember(replicated_handle, model)
        return replicated_handle
    if ddp._comm_hooks:
        raise RuntimeError(HOOKED)
    refuse_inside(ddp.module, (each for each in ddp._module_parameters if each.requires_grad))  # no ignored ones
    handle = handle_for(spec, ddp, **options, optimizer=optimizer)
    ddp.register_comm_hook(handle, compress_bucket)
    remember(handle, ddp)
    _advise_views(ddp)
    return handle


def _advise_views(ddp: DistributedDataParallel) -> None:
    """Say on the first rank what views of buckets would save, where that is much."""
    copied = [each for each in ddp._module_parameters if each.requires_grad]
    megabytes = sum(each.numel() * each.element_size() for each in copied) / 1e6
    if (
        megabytes >= WORTH_SAYING
        and not getattr(ddp, "gradient_as_bucket_view", True)
        and ddp.process_group.rank() == 0
    ):
        logger.warning(
            "gradwire: DistributedDataParallel(..., gradient_as_bucket_view=True) would save %.0f MB on each rank: "
            "gradients would be views of its buckets, not copies",
            megabytes,
        )


def _way_out(model: object) -> str:
    """Return the advice for a model that is not DDP."""
    for kind in type(model).__mro__:
        for name in (kind.__name__, f"{kind.__module__}.{kind.__name__}"):
            if name in NOT_DDP:
                return NOT_DDP[name]
    inside = model.named_modules() if isinstance(model, nn.Module) else ()
    found = next((name for name, module in inside if isinstance(module, DistributedDataParallel)), None)
    return "wrap it first, or fully_shard it, then attach" if found is None else f"its {found} is one: attach to that"


def handle_for(
    spec: Spec,
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: Decorator | None = None,
    optimizer: Optimizers | None = None,
    undo: bool = False,
) -> Handle:
    """Return the handle of a model, DDP or bare, for `compress_bucket`. The arguments are those of `attach`."""
    ddp = ddp_inside(model)
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(PYTHON_REDUCER)
    if ddp is not None:
        refuse_parts(trained_now(ddp.module)[0])
    if process_group is None and ddp is not None:
        process_group = ddp.process_group
    partial = ddp is not None and ddp.find_unused_parameters and not ddp.static_graph
    settings: dict[str, Any] = {"partial": partial, "transport": transport, "undo": undo}
    handle = Handle(tuned(spec, optimizer), process_group, timeout, **settings)
    handle.bind(ddp or model)
    handle.suit(optimizer, handle.averager.names, spec)
    NeverCalled.watch(handle, ddp or model)
    handle.averager.copies = ddp is not None and not ddp.gradient_as_bucket_view
    if ddp is not None:
        guard = Guard(ddp, own=isinstance(ddp, OwnDDP))
        ddp.register_forward_pre_hook(guard)
        handle.guard = None if guard.strays is None else guard.refuse_taken
        shows_no_steps = ddp.static_graph or getattr(ddp, "skip_all_reduce_unused_params", False)
        if shows_no_steps and not isinstance(ddp, OwnDDP):
            handle.step_detector = detector = ByForward()
            ddp.register_forward_pre_hook(detector.announce)
            ddp.register_forward_hook(detector.watch)
    return handle
