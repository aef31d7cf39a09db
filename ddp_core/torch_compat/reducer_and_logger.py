"""Answers of our reducer and a logger to what other code asks of torch's C++ ones; the steps of a rank without more inputs.

Of the logging data `can_set_static_graph` is Lightning's. All other keys are those that torch's tests read, and no more.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from ..averaging.averager import Averager
from ..measure.step import Step
from ..measure.timeline import StepTimes
from ..reducer.backward import Backward
from ..reducer.launch_ready_buckets import Reducer
from ..reducer.same_model import agreed_rank
from ..transport.torch_groups import gloo_threads

ENVIRONMENT = (
    *("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
)
DTYPES = {torch.float32: "float", torch.float64: "double"}  # as C++ calls them
NANOSECONDS = 1_000_000_000
ALWAYS_SAMPLED = 10  # steps at the beginning
SAMPLE_RATE = 100  # steps a sample after these


class Logger:
    """Describes `model`, our DistributedDataParallel, and samples its steps. `data`: texts and numbers by torch's names.

    Times are nanoseconds of the host. The backward of a step is counted from the end of its forward.
    """

    def __init__(self, model: Any) -> None:
        self.sample_rate, self._samples = SAMPLE_RATE, 0
        self._model = weakref.proxy(model)  # whose logger this is
        group, parameters = model.process_group, model.reducer.parameters
        self.data: dict[str, Any] = {
            "module_name": type(model.module).__name__,
            "backend_name": dist.get_backend(group),
            "device_ids": _listed(model.device_ids or ()),
            "dtypes": _listed(sorted({DTYPES.get(each.dtype, str(each.dtype)) for each in parameters})),
            "bucket_sizes": _listed(self._bucket_sizes()),
            **{name.lower(): os.environ.get(name, "N/A") for name in ENVIRONMENT},
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(each.nbytes for each in parameters),
            "output_device": -1 if model.output_device is None else model.output_device,
            "broadcast_buffers": int(model.forward_sync_buffers),
            "has_sync_bn": int(any(isinstance(each, nn.SyncBatchNorm) for each in model.module.modules())),
            "bucket_cap_bytes": model.bucket_bytes_cap,
            "find_unused_parameters": int(model.find_unused_parameters),
            "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        }
        if dist.get_backend(group) == "gloo":
            self.data["gloo_num_threads"] = gloo_threads(group)

    def sample(self) -> None:
        """Sample the step before a synchronized forward, if it is time to."""
        model, reducer = self._model, self._model.reducer
        step, rebuilt = reducer.finished, model._has_rebuilt_buckets
        if not step or (step > ALWAYS_SAMPLED and step % self.sample_rate):
            return
        used = set(reducer.traced) if model.find_unused_parameters else range(len(reducer.parameters))
        unused = (each.nbytes for index, each in enumerate(reducer.parameters) if index not in used)
        self.data |= {
            "iteration": step,
            "has_rebuilt_buckets": int(rebuilt),
            "unused_parameter_size": sum(unused),
            "prev_iteration_grad_ready_order_indices": _listed(reducer.traced),
        }
        if rebuilt:
            members = [" ".join(map(str, bucket.members)) for bucket in reducer.assignment.buckets]
            self.data["rebuilt_bucket_sizes"] = _listed(self._bucket_sizes())
            self.data["rebuilt_per_bucket_param_indices"] = _listed(members)
        if (times := model.timeline.last) is not None:
            self.data["num_buckets_reduced"] = len(times.buckets)
            self._add(times)

    def _add(self, times: StepTimes) -> None:
        """Note the times of a step, and the mean durations of all samples."""
        durations, moments = timed(times)
        self._samples += 1
        for name, seconds in durations.items():
            duration = max(1, int(seconds * NANOSECONDS))
            before = self.data.get(f"avg_{name}", 0) * (self._samples - 1)
            self.data |= {name: duration, f"avg_{name}": (before + duration) // self._samples}
        epoch = time.time_ns() - int((time.perf_counter() - times.began) * NANOSECONDS)
        self.data |= {name: epoch + int(moment * NANOSECONDS) for name, moment in moments.items()}

    def _bucket_sizes(self) -> list[int]:
        return [sum(each.nbytes for each in bucket.parameters()) for bucket in self._model.reducer.assignment.buckets]

    def set_error(self, error: str) -> None:
        """Keep the text of an error that the user is about to see."""
        self.data |= {"error": error, "has_error": 1, "iteration": self._model.reducer.finished}

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        reducer = self._model.reducer
        static = {"can_set_static_graph": int(reducer._ddp_graph_static())} if reducer.finished else {}
        return SimpleNamespace(strs_map=self.data | static, ints_map={})  # torch's method puts the two together


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def timed(times: StepTimes) -> tuple[dict[str, float], dict[str, float]]:
    """Return the durations of a step's parts in seconds, and when they began and ended, after the beginning of forward.

    Communication lasts from the first bucket's launch to the last average. Without a bucket it is the end of the step.
    """
    begin = min((bucket.launched for bucket in times.buckets), default=times.total)
    end = max((bucket.done for bucket in times.buckets), default=times.total)
    computed = times.forward + times.backward
    durations = {
        "forward_compute_time": times.forward,
        "backward_compute_time": times.backward,
        "backward_comm_time": end - begin,
        "backward_compute_comm_overlap_time": min(end, computed) - begin,
    }
    return durations, {
        "forward_compute_time_start": 0.0,
        "backward_compute_time_start": times.forward,
        "backward_comm_time_start": begin,
        "backward_compute_time_end": computed,
        "backward_comm_time_end": end,
    }


class TorchReducer(Reducer):
    """A reducer that writes its errors to a logger, and answers to some of the names of torch's."""

    logger: Logger | None = None

    def fills_buckets(self) -> bool:
        """Return True if gradients go into buckets, now or at the end of this backward."""
        return self._backward is not None or self.assignment.alias

    def hand_over(self, averager: Averager) -> None:
        """Another one averages from now on, also in the backward of a forward that has run."""
        self.averager = averager
        if (backward := self._backward) is not None and not backward.under_way:
            backward.leaves_out = self.leaves_out
            for bucket in self.assignment.buckets:
                bucket.scale = averager.scale

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Synchronize the next backward, though its forward ran inside `no_sync`: pipeline stages do so.

        Raises RuntimeError where unused parameters are looked for: only a synchronized forward can prepare that.
        """
        if self.watches:
            raise RuntimeError(
                "a backward whose forward ran inside no_sync cannot be synchronized with find_unused_parameters=True, nor "
                "as the first one with static_graph=True: leave both out"
            )
        self.expect_backward()

    def shadow(self) -> None:
        """Take part in a step with zeros: this rank has no more inputs, others have."""
        self.require_finished()
        self._backward = backward = self._opened(Step())
        try:
            self._send_nothing(backward)
            for bucket in self.assignment.buckets:
                self.average_of(bucket, backward)
        except BaseException as error:
            self.fail(backward, error)
            raise
        self.end(backward)
        backward.step.ended = time.perf_counter()
        self.averager.end_step()

    def _send_nothing(self, backward: Backward) -> None:
        nothing = bytearray(len(self.parameters))
        if self.rules.dynamic and backward.leaves_out:
            self._ask(backward, nothing)
        for bucket in self.assignment.sending:
            self._send(backward, bucket, zeros=True)
        if backward.usage is None and backward.asks:
            self._ask(backward, nothing)

    def _failure(self, text: str) -> RuntimeError:
        if self.logger is not None:
            with suppress(ReferenceError):  # the model whose logger it is may be gone
                self.logger.set_error(text)
        return super()._failure(text)

    def _ddp_graph_static(self) -> bool:
        """Return True if all steps so far have reached the same parameters."""
        return not self._reached_others

    def _get_local_used_map(self) -> Tensor:
        """By index, how many ranks used a parameter in the last step, int32; the number of all ranks if nobody asked."""
        if self.usage is None:
            return torch.full((len(self.parameters),), self.transport.ranks.world_size, dtype=torch.int32)
        return torch.tensor(self.usage.counts, dtype=torch.int32, device=self.device)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"gradwire's reducer has no {name}: code that works on the inside of torch's C++ reducer needs "
                "torch.nn.parallel.DistributedDataParallel, on which gradwire.attach() compresses, too"
            )


class ShadowSteps(JoinHook):
    """Mirrors every collective of the others' steps, with gradients of zero. `model`: our DistributedDataParallel."""

    def __init__(self, model: Any, divide_by_initial_world_size: bool) -> None:
        self.model = model
        model.divide_by_initial_world_size = divide_by_initial_world_size
        model.logger.data["join_uneven_inputs"] = 1
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others."""
        model = self.model
        model.sync_buffers(candidate=False)
        model.agree_on_order()
        synced = model.backward_is_synced(joined=True)
        model.sync_buffers(candidate=False, after_forward=True)
        model.require_forward_param_sync = synced
        if synced:
            model.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the last input of all: the model of the ranks that trained longest is everybody's."""
        model = self.model
        model._authoritative_rank = agreed_rank(is_last_joiner, model.reducer.transport)
        model.copy_states(model._authoritative_rank)
