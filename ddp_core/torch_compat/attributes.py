"""The parts of torch's DistributedDataParallel that other code reads and calls, without the C++ underneath."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _get_device_index
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..measure.timeline import Timeline
from .arguments import Arguments, states
from .torch_reducer import TorchReducer

BUILT_IN_HOOKS = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
MANUAL = "let backward end by itself: it waits for communication only after its last gradient"


def _unsupported(what: str, way_out: str) -> Any:
    """A method that refuses to be called."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"gradwire's DistributedDataParallel has no {what}: {way_out}")

    return refuse


class TorchAttributes(TorchDDP):
    """The attributes and private methods of torch's class, for a model that a reducer of ours averages."""

    arguments: Arguments
    reducer: TorchReducer = None  # type: ignore[assignment]  # until construction has come so far
    logger = None  # torch's describes its C++ reducer
    timeline: Timeline
    output_device: Any
    joined = False  # a rank has run out of inputs inside of `join`
    _hook: tuple[object, Callable[..., Any]] | None = None

    def _take_attributes(self) -> None:
        """Set the attributes that other code reads of a DDP model, and those that users set."""
        arguments = self.arguments
        self.dim = arguments.dim
        self.find_unused_parameters = arguments.find_unused_parameters
        self.gradient_as_bucket_view = arguments.gradient_as_bucket_view
        self.batched_grad_copy = arguments.batched_grad_copy
        self.lazy_bucket_allocation = arguments.lazy_bucket_allocation
        self.skip_all_reduce_unused_params = arguments.skip_all_reduce_unused_params
        self.forward_sync_buffers = arguments.sync_buffers
        self.mixed_precision = None
        self.static_graph = False
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.use_side_stream_for_tensor_copies = True
        self.parameters_to_ignore = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        self.broadcast_bucket_size = 250 * 1024 * 1024
        caps = arguments.rules().caps
        self.bucket_bytes_cap = max(caps)
        self.bucket_bytes_cap_list = list(caps) if arguments.bucket_cap_mb_list else []
        self.bucket_bytes_cap_default = caps[0] < max(caps) and not arguments.bucket_cap_mb_list
        self._use_python_reducer = self._delay_all_reduce_all_params = False
        self._ddp_sink_clone = True

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.finished:
            self._log_and_throw(
                RuntimeError, "static_graph is set too late: it should be called before training loop starts."
            )
        if self.find_unused_parameters:
            warnings.warn(
                "static_graph=True finds unused parameters by itself, in the first iteration: find_unused_parameters=True "
                "changes nothing",
                stacklevel=2,
            )
        self.static_graph = True
        self.arguments = dataclasses.replace(self.arguments, static_graph=True)
        self.reducer.rules = self.arguments.rules()

    def _take_devices(self) -> None:
        self._module_parameters = list(states(self.module, buffers=False).values())
        types = {parameter.device.type for parameter in self._module_parameters}
        if len(types) != 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
                f"locate in {sorted(types)}."
            )
        given, output_device = self.arguments.device_ids, self.arguments.output_device
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in self._module_parameters}) > 1
        placed = self.device_type != "cpu" and not self.is_multi_device_module
        if (given or output_device) and not (placed and given):
            devices = sorted({str(parameter.device) for parameter in self._module_parameters})
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-"
                f"device GPU modules or CPU modules, but got device_ids {given}, output_device {output_device}, and "
                f"module parameters {devices}."
            )
        self.device_ids = [_get_device_index(device, True) for device in given] if given else None
        wanted = output_device if output_device is not None or not given else given[0]
        self.output_device = None if wanted is None or not given else _get_device_index(wanted, True)

    @property
    def broadcast_buffers(self) -> bool:
        """True if buffers come from rank 0 before every forward; an older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:  # type: ignore[override]
        return [] if self._hook is None else [(self._hook[1], self._hook[0])]

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self.register_comm_hook(self.process_group, BUILT_IN_HOOKS[comm_hook_type])

    def _check_comm_hook(self, hook: Any) -> None:
        """Raise TypeError or ValueError unless torch's DDP would take the hook, too; bf16 needs no GPU here."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        if "bucket" not in signature.parameters:
            self._log_and_throw(
                ValueError, f"Communication hook: it is called as hook(state, bucket), not {signature}."
            )
        if signature.parameters["bucket"].annotation not in (inspect.Parameter.empty, dist.GradBucket):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    def _check_default_group(self) -> None:
        """Raise RuntimeError unless the model can be pickled: only the default group is there again where it is loaded."""
        several = isinstance(self.arguments.process_group, Sequence)
        if several or not dist.is_initialized() or self.process_group != dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, when "
                "you have called init_process_group and have not passed process_group argument to DDP constructor",
            )

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        if self.reducer is not None:
            self.reducer.failure = f"{err_type}: {err_msg}"
        raise err_type(err_msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what Lightning reads, `can_set_static_graph`; and what shows torch's tests how a step or a call went."""
        reducer, last = self.reducer, self.timeline.last
        data: dict[str, Any] = {"iteration": reducer.finished, "join_uneven_inputs": int(self.joined)}
        data |= {"can_set_static_graph": int(reducer._ddp_graph_static())} if reducer.finished else {}
        data |= {} if last is None else {"num_buckets_reduced": len(last.buckets)}
        return data | ({"error": reducer.failure, "has_error": 1} if reducer.failure else {})

    def _setup_in_backward_optimizers(self) -> None:
        """Let `torch.distributed.optim._apply_optimizer_in_backward` step once the averages are there, not before."""
        parameters = [each for each in self._module_parameters if hasattr(each, "_in_backward_optimizers")]
        if not parameters:
            return
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

        for parameter in parameters:
            for handle in handles.get(parameter, []):
                handle.remove()

        def step() -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    for optimizer in parameter._in_backward_optimizers:
                        optimizer.step()
                    parameter.grad = None

        self.reducer.optimizers.append(step)

    def _remove_autograd_hooks(self) -> None:
        self.reducer.hooks.detach()

    def _check_reducer_finalized(self) -> None:
        self.reducer.require_finished()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always False: backward ends by itself."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise RuntimeError(f"gradwire's DistributedDataParallel has no manual finalization of backward: {MANUAL}")

    @property
    def should_finalize_after_backward(self) -> bool:
        """Always False."""
        return False

    finalize_backward = _unsupported("finalize_backward()", MANUAL)
    _register_buffer_comm_hook = _unsupported(
        "hook for buffers", "pass forward_sync_buffers=False, and average buffers in your training loop"
    )
    _update_process_group = _unsupported(
        "_update_process_group()",
        "wrap the module anew in the other group, and load compression.state_dict(), with resize=True on another number "
        "of ranks",
    )
    _set_ddp_runtime_logging_sample_rate = _unsupported("logger", "gradwire.watch reports the cost of steps")
    _set_sparse_metadata = _unsupported("sparse metadata", "embeddings with sparse=True need none")
