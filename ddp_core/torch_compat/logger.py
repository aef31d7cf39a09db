"""What `_get_ddp_logging_data` tells of a model, under torch's names."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..measure.timeline import StepTimes

ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
DTYPES = {  # as C++ calls them
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
NANOSECONDS = 1_000_000_000
ALWAYS_SAMPLED = 10  # steps at the beginning
SAMPLE_RATE = 100  # steps a sample after these


@dataclass
class LoggingData:
    """Texts and numbers by name."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class Logger:
    """Collects what is known of `model`, our DistributedDataParallel, and now and then of its steps, as torch's Logger.

    Times are nanoseconds of the host. The backward of a step is counted from the end of its forward.
    """

    def __init__(self, model: Any) -> None:
        self.sample_rate = SAMPLE_RATE
        self._model = weakref.proxy(model)  # whose logger this is
        self._data = LoggingData()
        self._samples = 0
        self._describe(model)

    def _describe(self, model: Any) -> None:
        group, parameters = model.process_group, model.reducer.parameters
        backend = dist.get_backend(group)
        self._data.strs_map |= {
            "module_name": type(model.module).__name__,
            "backend_name": backend,
            "device_ids": _listed(model.device_ids or ()),
            "dtypes": _listed(sorted({DTYPES.get(each.dtype, str(each.dtype)) for each in parameters})),
            "bucket_sizes": _listed(self._bucket_sizes()),
            **{_key(name): os.environ.get(name, "N/A") for name in (*ENVIRONMENT, *OF_BACKEND.get(backend, ()))},
        }
        self._data.ints_map |= {
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "is_multi_device_module": model.is_multi_device_module,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
            "output_device": -1 if model.output_device is None else model.output_device,
            "broadcast_buffers": int(model.forward_sync_buffers),
            "has_sync_bn": int(any(isinstance(each, nn.SyncBatchNorm) for each in model.module.modules())),
            "bucket_cap_bytes": model.bucket_bytes_cap,
            "find_unused_parameters": int(model.find_unused_parameters),
            "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        }
        if backend == "gloo":
            options = getattr(group._get_backend(torch.device("cpu")), "options", None)
            self._data.ints_map["gloo_num_threads"] = getattr(options, "_threads", 0)
        if model.static_graph:
            self._set_static_graph()

    def set_runtime_stats_and_log(self) -> None:
        """At the beginning of a synchronized forward: sample the steps before, if it is time to."""
        step = self._model.reducer.finished
        if step and (step <= ALWAYS_SAMPLED or step % self.sample_rate == 0):
            self._sample(step)

    def _sample(self, step: int) -> None:
        reducer = self._model.reducer
        numbers = {"iteration": step, "has_rebuilt_buckets": int(self._model._has_rebuilt_buckets)}
        numbers["unused_parameter_size"] = self._unused_bytes()
        texts = {"prev_iteration_grad_ready_order_indices": _listed(reducer.traced)}
        if self._model._has_rebuilt_buckets:
            texts["rebuilt_bucket_sizes"] = _listed(self._bucket_sizes())
            members = [" ".join(map(str, bucket.members)) for bucket in reducer.assignment.buckets]
            texts["rebuilt_per_bucket_param_indices"] = _listed(members)
        self._data.ints_map |= numbers
        self._data.strs_map |= texts
        if (times := self._model.timeline.last) is not None:
            self._data.ints_map["num_buckets_reduced"] = len(times.buckets)
            self._samples += 1
            self._average_in(_durations(times))
            self._data.ints_map |= _moments(times)

    def _average_in(self, durations: dict[str, int]) -> None:
        numbers = self._data.ints_map
        for name, duration in durations.items():
            before = numbers.get(f"avg_{name}", 0) * (self._samples - 1)
            numbers |= {name: duration, f"avg_{name}": (before + duration) // self._samples}

    def _bucket_sizes(self) -> list[int]:
        return [sum(each.nbytes for each in bucket.parameters()) for bucket in self._model.reducer.assignment.buckets]

    def _unused_bytes(self) -> int:
        if not self._model.find_unused_parameters:
            return 0
        used = set(self._model.reducer.traced)
        return sum(each.nbytes for index, each in enumerate(self._model.reducer.parameters) if index not in used)

    def set_error_and_log(self, error: str) -> None:
        """Keep the text of an error that the user is about to see."""
        self._data.strs_map["error"] = error
        self._data.ints_map |= {"has_error": 1, "iteration": self._model.reducer.finished}

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        data = LoggingData(dict(self._data.strs_map), dict(self._data.ints_map))
        if self._model.reducer.finished:
            data.ints_map["can_set_static_graph"] = int(self._model.reducer._ddp_graph_static())
        return data


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _key(variable: str) -> str:
    return variable.removeprefix("TORCH_").lower() if variable.startswith("TORCH_NCCL") else variable.lower()


def _communication(times: StepTimes) -> tuple[float, float]:
    """When the first bucket left and the last average was there; with no bucket, the end of the step."""
    first = min((bucket.launched for bucket in times.buckets), default=times.total)
    return first, max((bucket.done for bucket in times.buckets), default=times.total)


def _durations(times: StepTimes) -> dict[str, int]:
    """How long parts of a step took, in nanoseconds, at least 1."""
    begin, end = _communication(times)
    seconds = {
        "forward_compute_time": times.forward,
        "backward_compute_time": times.backward,
        "backward_comm_time": end - begin,
        "backward_compute_comm_overlap_time": min(end, times.forward + times.backward) - begin,
    }
    return {name: max(1, int(duration * NANOSECONDS)) for name, duration in seconds.items()}


def _moments(times: StepTimes) -> dict[str, int]:
    """When they began and ended, in nanoseconds since 1970."""
    begin, end = _communication(times)
    epoch = time.time_ns() - int((time.perf_counter() - times.began) * NANOSECONDS)
    seconds = {
        "forward_compute_time_start": 0.0,
        "backward_compute_time_start": times.forward,
        "backward_comm_time_start": begin,
        "backward_compute_time_end": times.forward + times.backward,
        "backward_comm_time_end": end,
    }
    return {name: epoch + int(moment * NANOSECONDS) for name, moment in seconds.items()}
