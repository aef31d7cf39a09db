"""Answers of our reducer to what other code asks of torch's C++ one; and the steps of a rank without more inputs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from ..averaging.averager import Averager
from ..measure.step import Step
from ..reducer.backward import Backward
from ..reducer.reducer import Reducer
from ..reducer.same_model import agreed_rank


class TorchReducer(Reducer):
    """A reducer that answers to some of the names of torch's, and keeps the text of its last error: `failure`."""

    failure = ""

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
            self.break_off(backward, error)
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

    def _given_up(self, text: str) -> RuntimeError:
        self.failure = text
        return super()._given_up(text)

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
        model.joined = True
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others."""
        model = self.model
        model.sync_buffers(candidate=False)
        model.agree_on_order()
        synced = model.backward_is_synced(joined=True)
        model.require_forward_param_sync = synced
        if synced:
            model.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the last input of all: the model of the ranks that trained longest is everybody's."""
        model = self.model
        model._authoritative_rank = agreed_rank(is_last_joiner, model.reducer.transport)
        model.copy_states(model._authoritative_rank)
