"""A drop-in for torch's DistributedDataParallel, with compression inside (Li et al. 2020)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ..compress import Spec
from .arguments import Arguments, states, trained
from .buffers import BufferSync
from .collectives import largest, spread
from .engine import DEFAULT_TIMEOUT
from .grad_bucket import GradBucket
from .handle import Handle
from .joining import ShadowSteps
from .reducer import Reducer
from .replicas import described, verify
from .sink import tensors_in, watched

ORDER_INTERVAL = 64  # synced steps between two looks at the order in which gradients get ready
BUILT_IN_HOOKS = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class DistributedDataParallel(TorchDDP):
    """Data-parallel training of `module`: gradients are averaged over ranks while backward still runs.

    Takes torch's arguments, in torch's order and with its defaults: see `Arguments`. `compressor`: what goes on the wire,
    such as "powersgd:rank=4". `process_group` may be a list of groups, among which buckets go in turn. `timeout`: of every
    wait on the CPU. `compression` is the handle: statistics, checkpoints, `swap`.

    Raises RuntimeError on every rank where models differ, naming the first difference.
    """

    reducer: Reducer  # type: ignore[assignment]
    output_device: Any

    def __init__(
        self,
        module: nn.Module,
        *arguments: Any,
        compressor: Spec = "none",
        timeout: timedelta = DEFAULT_TIMEOUT,
        **named_arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.arguments = Arguments(*arguments, **named_arguments)
        self.module = module
        self._setup = (compressor, timeout)
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._take_attributes()
        self._connect(self.arguments.groups())
        if self.arguments.init_sync:
            verify(described(dict(module.named_parameters()), str(compressor)), self.process_group)
            self.copy_states(0, buffers=self.arguments.sync_buffers_at_start)

    def _take_attributes(self) -> None:
        """What other code reads of a DDP model, and what users set."""
        arguments, parameters = self.arguments, states(self.module, buffers=False)
        types = {parameter.device.type for parameter in parameters}
        if len(types) != 1:
            raise ValueError(f"all parameters have to be on the same type of device, got {sorted(types)}")
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1
        placed = self.device_type != "cpu" and not self.is_multi_device_module
        if (arguments.device_ids or arguments.output_device is not None) and not placed:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules, "
                f"but got device_ids {arguments.device_ids}, output_device {arguments.output_device} for {self.device}"
            )
        self.device_ids = [torch.device(device).index for device in arguments.device_ids or ()] or None
        self.output_device = arguments.output_device if self.device_ids is None else self.device_ids[0]
        self.dim = arguments.dim
        self.find_unused_parameters = arguments.find_unused_parameters
        self.gradient_as_bucket_view = arguments.gradient_as_bucket_view
        self.static_graph = arguments.static_graph
        self.skip_all_reduce_unused_params = arguments.skip_all_reduce_unused_params
        self.forward_sync_buffers = arguments.sync_buffers
        self.mixed_precision = None
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.parameters_to_ignore = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        self._use_python_reducer = False
        self._ddp_sink_clone = True

    def _connect(self, groups: list[dist.ProcessGroup]) -> None:
        """Make what a pickle leaves out: the process groups, the compression, the reducer."""
        compressor, timeout = self._setup
        rules = self.arguments.rules()
        named, sparse = trained(self.module)
        self.process_group = groups[0]
        self.buffers_sync = BufferSync(self.module, self.process_group)
        self.compression = Handle(compressor, groups, timeout, partial=rules.find_unused_parameters)
        self.compression.bind(self.module)
        self.bucket_bytes_cap = rules.caps[-1]
        self.bucket_bytes_cap_default = len(rules.caps) > 1
        self.reducer = Reducer(list(named.values()), list(named), sparse, rules, self.process_group, self._average)
        self.reducer.at_end.append(self.buffers_sync.wait)
        self._looked_at = self._begun = 0

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._hook is not None:
            state, hook = self._hook
            return hook(state, bucket)  # type: ignore[no-any-return]
        if self._begun <= self.reducer.finished:
            self._begun = self.reducer.finished + 1
            self.compression.begin_step()
        return self.compression.average(bucket)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward from its outputs averages the gradients, unless inside `no_sync`."""
        with record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synced:
            self.reducer.require_finished()
        if work := Join.notify_join_context(self):
            work.wait()
            active = 1.0 if self.divide_by_initial_world_size else float(work.result()[0]) / self.process_group.size()
            self.reducer.share = active
        if torch.is_grad_enabled():
            self.agree_on_order()
        self.sync_buffers(candidate=True, after_forward=False)
        if self._join_config.enable:
            self.backward_is_synced(joined=False)
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), True)
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        self.sync_buffers(candidate=True, after_forward=True)
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synced
        if not synced:
            self.reducer.pause()
            return output
        dynamic = self.find_unused_parameters and not self.static_graph
        scale = self.compression.scale if self._hook is None else 1.0
        self.reducer.begin(tensors_in(output) if dynamic else (), scale)
        if dynamic or self.reducer.delays:
            return watched(output, self.reducer, clone=self._ddp_sink_clone)
        return output

    def agree_on_order(self) -> None:
        """Now and then, between steps: buckets for the order in which gradients get ready on rank 0."""
        steps = self.reducer.finished
        if steps == self._looked_at or (steps != 1 and steps % ORDER_INTERVAL):
            return
        self._looked_at = steps
        order = torch.tensor(self.reducer.proposal(), device=self.device)
        spread([order], 0, self.process_group)
        if (agreed := order.tolist()) != self.reducer.order:
            self.reducer.build(agreed)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.buffers_sync.current())

    def sync_buffers(self, *, candidate: bool, after_forward: bool = False) -> None:
        """Make the buffers of all ranks those of one; `candidate`: it may be this one."""
        if self.buffers_sync.after_forward == after_forward and self.will_sync_module_buffers():
            self.buffers_sync.run(agree=self._join_config.enable, candidate=candidate)

    def copy_states(self, source: int, *, buffers: bool | None = None) -> None:
        """Make parameters, and buffers if they are synchronized, those of rank `source`."""
        wanted = self.forward_sync_buffers if buffers is None else buffers
        self.buffers_sync.copy(states(self.module, buffers=wanted), source)

    def backward_is_synced(self, *, joined: bool) -> bool:
        """Whether the other ranks' next backward averages gradients; all ranks ask, inside `join`."""
        mine = self.require_backward_grad_sync and not joined
        return bool(largest(int(mine), self.process_group, self.device))

    def join_hook(self, **kwargs: Any) -> ShadowSteps:
        """What `join` has this rank do once its inputs have ended; `divide_by_initial_world_size` as in torch."""
        return ShadowSteps(self, kwargs.get("divide_by_initial_world_size", True))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` average buckets: torch's hooks, gradwire's, or your own. Once a model."""
        self._check_comm_hook(hook)
        if self._hook is not None or self._setup[0] != "none":
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once, on a model made with "
                f"compressor='none'; this one has {self._hook[1] if self._hook else self._setup[0]}"
            )
        self._hook = (state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self.register_comm_hook(self.process_group, BUILT_IN_HOOKS[comm_hook_type])

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        after_forward = comm_hook_location == _BufferCommHookLocation.POST_FORWARD
        self.buffers_sync.register(state, hook, after_forward=after_forward)

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        parameters = inspect.signature(hook).parameters
        bucket, result = parameters["bucket"].annotation, inspect.signature(hook).return_annotation
        if bucket not in (inspect.Parameter.empty, dist.GradBucket):
            raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
        if result not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
            raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")

    def _set_static_graph(self) -> None:
        if not self.static_graph:
            self.static_graph = True
            self.arguments = dataclasses.replace(self.arguments, static_graph=True)
            self.reducer.rules = self.arguments.rules()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        self._ddp_sink_clone = val

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self) -> None:
        self.reducer.require_finished()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: make it "
                "without process_group and device_mesh"
            )
        kept = {**self.__dict__, "compression": self.compression.state_dict()}
        for name in ("process_group", "reducer", "buffers_sync", "_hook"):
            del kept[name]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        compression = state.pop("compression")
        nn.Module.__setstate__(self, state)
        self._hook = None
        self._connect(self.arguments.groups())
        self.compression.load_state_dict(compression)
