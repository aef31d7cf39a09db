"""Communication hooks of torch's signature `(state, bucket)`, which need no handle first."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

import atexit
import inspect
import os
import sys
import warnings
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compress import Optimizers, Spec, specification
from ..compress import compressor as compressor_of
from ..compress.builder.spelling import nearest_named
from ..ddp_core import Decorator, Handle, Scaler, refuse_inside
from .backwards import ModelHook
from .handle_of import handle_with, remember
from .torch_ddp import compress_bucket, handle_for

NOT_REGISTERED = (
    "gradwire's hook got a bucket of a model that it was not registered on: call "
    "ddp_model.register_comm_hook(None, hook) with the hook itself. Around int8, torch's fp16_compress_wrapper is "
    "gradwire.comm_hook('fp16+int8')"
)
STATE = (
    "the state of gradwire's hook is the process group to average on, or None for the model's own: "
    "ddp_model.register_comm_hook(None, hook); got {}. Other arguments, such as the optimizer, go to "
    "gradwire.comm_hook('int4', optimizer=optimizer)"
)
NEVER_CALLED = (
    "gradwire's hook {} was never called: nothing was compressed by it. Lightning's DDPStrategy registers hooks on GPUs "
    "only: use gradwire.lightning.GradwireStrategy. Accelerate ignores hooks that are callables: use "
    "gradwire.AccelerateKwargs. In a loop of your own call ddp_model.register_comm_hook(None, hook)"
)
_made: WeakSet["CommHook"] = WeakSet()


class CommHook:
    """A communication hook with torch's signature: `ddp_model.register_comm_hook(None, hook)`.

    Several models may have the same hook. Each model has its own handle: `gradwire.handle_of(ddp_model)`.
    """

    def __init__(self, spec: Spec, options: dict[str, Any], name: str) -> None:
        compressor_of(spec)  # which refuses a wrong one here
        self.__name__, self.__qualname__ = name, f"gradwire.{name}"
        self._spec, self._options = spec, options
        self.called = False
        _made.add(self)

    @torch._disable_dynamo  # where a compiled function calls backward
    def __call__(
        self, state: dist.ProcessGroup | Handle | None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over ranks, by the handle of the model that it is of."""
        self.called = True
        handle = state if isinstance(state, Handle) else handle_with(bucket.parameters()[0])
        if handle is None:
            raise RuntimeError(NOT_REGISTERED)
        return compress_bucket(handle, bucket)

    def __getattr__(self, name: str) -> Any:
        """Return the signature that torch checks when it registers a hook; that is when the model gets its handle."""
        if name != "__signature__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # torch hands a hook buckets alone: their parameters do not lead to names, group and other buckets of the model. Nor
        # could a shared hook tell whose bucket it gets in one backward of two models. Who registers it is known here alone.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "register_comm_hook":
            frame = frame.f_back
        if frame is not None and isinstance(ddp := frame.f_locals.get("self"), DistributedDataParallel):
            self._register(ddp, frame.f_locals.get("state"))
        return inspect.signature(self.__call__)

    def _register(self, ddp: DistributedDataParallel, state: object) -> None:
        """Make the handle of a model; not for one that has a hook already, which torch is about to refuse."""
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(STATE.format(repr(state) if isinstance(state, str) else type(state).__name__))
        if ddp._comm_hooks:
            return
        refuse_inside(ddp.module, (each for each in ddp._module_parameters if each.requires_grad))
        options = dict(self._options)
        scaler = options.pop("scaler", None)
        handle = handle_for(self._spec, ddp, process_group=state, **options)
        if scaler is not None:
            handle.follow(scaler)
        ddp.register_forward_pre_hook(ModelHook(handle.forward_begins, keeps=True))  # nobody else keeps it
        remember(handle, ddp)

    def handle_on(self, ddp: DistributedDataParallel) -> Handle | None:
        """Return the handle of a model that the hook is registered on."""
        return handle_with(next(each for each in ddp.parameters() if each.requires_grad))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have no handles."""
        return CommHook, (self._spec, self._options, self.__name__)

    def __repr__(self) -> str:
        return f"<gradwire's hook: {specification(compressor_of(self._spec))}>"


@nearest_named
def comm_hook(
    compressor: Spec,
    *,
    timeout: timedelta | None = None,
    transport: Decorator | None = None,
    optimizer: Optimizers | None = None,
    scaler: Scaler | None = None,
    undo: bool = False,
) -> CommHook:
    """Return a hook for torch's own call: `ddp_model.register_comm_hook(None, gradwire.comm_hook("int4"))`.

    It suits frameworks that register a hook themselves. `gradwire.comm_hooks.int8` is such a hook with defaults, for
    settings that name a hook by its dotted path. torch's `state` is the process group to average on; None is the model's
    own. At the end of a process of several ranks, a warning names a hook that was never called.

    Args:
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        timeout: limit of each wait for an average, on the CPU; by default that of the process group.
        transport: a function that wraps each transport, for example in an emulated link.
        optimizer: as for `gradwire.attach`.
        scaler: as for `gradwire.attach`.
        undo: as for `gradwire.attach`.

    Returns:
        The hook. `gradwire.handle_of(ddp_model)` returns the handle of a model that it is registered on.

    Raises:
        ValueError: the compressor is unknown or has a wrong option.
    """
    options = {"timeout": timeout, "transport": transport, "optimizer": optimizer, "scaler": scaler, "undo": undo}
    return CommHook(compressor, options, f"comm_hook({specification(compressor_of(compressor))!r})")


@atexit.register
def _warn_of_hooks_never_called() -> None:
    """Warn on the first rank of hooks that were made and never called; not after an error, which is the news then."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    several = together or int(os.environ.get("WORLD_SIZE") or 1) > 1
    rank = dist.get_rank() if together else int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    if several and rank == 0 and not hasattr(sys, "last_value"):
        called = {each.__qualname__ for each in _made if each.called}
        for name in sorted({each.__qualname__ for each in _made} - called):
            warnings.warn(NEVER_CALLED.format(name), stacklevel=1)
