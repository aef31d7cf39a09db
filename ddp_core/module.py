"""A drop-in for torch's DistributedDataParallel, with compression inside (Li et al. 2020)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs

from ..compress import Optimizers, Spec, tuned
from ..compress import compressor as compressor_of
from .averaging.averager import Averager, CompressedAverager
from .averaging.user_hook import HookAverager
from .buckets.assignment import BucketAssignment, allocate_own
from .handle import Handle
from .measure.timeline import StepTimes
from .memory.rescaled_residuals import Scaler
from .reducer.autograd import outside_transforms, transformed, watched, weak_call
from .reducer.bucket_order import BucketOrder
from .reducer.forks import ForkGuard
from .reducer.reducer import AT_END
from .reducer.same_model import agreed_rank, copy_from, described, verify
from .reducer.stray_gradients import Strays
from .torch_compat.arguments import Arguments, localize, refuse_around, refuse_inside, states, trained, trained_now
from .torch_compat.attributes import TorchAttributes
from .torch_compat.torch_reducer import ShadowSteps, TorchReducer
from .transport.parts_of_world import part_of
from .transport.protocol import Decorator
from .transport.rank_messages import largest

if TYPE_CHECKING:
    from .overlap.overlap import Overlap

REFRESH = "Call refresh() of the DistributedDataParallel on all ranks after such a change"
OWN_ARGUMENTS = ("module", "compressor", "timeout", "transport", "optimizer", "scaler", "undo")
LEFT_OUT = (  # of pickles
    "process_group",
    "device_mesh",
    "reducer",
    "timeline",
    "_copies",
    "_messages",
    "_order",
    "_strays",
    "_forks",
    "_hook",
    "_overlap",
)


class DistributedDataParallel(TorchAttributes):
    """Data-parallel training of `module`: gradients are averaged over ranks while backward still runs.

    Args:
        module: the model to train, the same on all ranks.
        arguments: those of torch's class, in the same order and with the same defaults. `process_group` may be a list
            of groups that take buckets in turn.
        compressor: the compressor of the gradients, such as "int4".
        timeout: limit of each wait for an average, on the CPU; by default that of the process group.
        transport: a function that wraps each transport, for example in an emulated link.
        optimizer: as for `gradwire.attach`.
        scaler: as for `gradwire.attach`.
        undo: as for `gradwire.attach`.
        named_arguments: those of torch's class, by the same names.

    Attributes:
        compression: the `Handle`: statistics, checkpoints, `swap`.

    Raises:
        RuntimeError: the ranks have different models. Every rank names the first difference.
        ValueError: an argument is out of range, or the compressor is unknown.
        TypeError: an argument is unknown.
    """

    _overlap: Overlap | None = None

    def __init__(
        self,
        module: nn.Module,
        *arguments: Any,
        compressor: Spec = "none",
        timeout: timedelta | None = None,
        transport: Decorator | None = None,
        optimizer: Optimizers | None = None,
        scaler: Scaler | None = None,
        undo: bool = False,
        **named_arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.arguments = Arguments.given(arguments, named_arguments, OWN_ARGUMENTS)
        self.arguments.warn()
        given, compressor = compressor, tuned(compressor, optimizer)
        self._setup = (compressor, timeout, transport, scaler, undo)
        if self.arguments.device_mesh is not None:
            self.device_mesh = self.arguments.device_mesh
            localize(module, self.device_mesh)
        self.module = module
        self._take_attributes()
        self._compresses = compressor != "none"  # without, averages of averages do no harm, and torch's allows them
        own = trained(module)[0].values()  # refuses a module with nothing to train
        if self._compresses:
            refuse_inside(module, own)  # before anything asks a parameter that is not initialized
        self._take_devices()
        self._passing_sync_batchnorm_handle(module)  # type: ignore[no-untyped-call]
        groups = self.arguments.groups()
        self._connect(groups, together=self.arguments.init_sync)
        self.compression.suit(optimizer, self.compression.averager.names, given)
        if self.arguments.init_sync:
            self.copy_states(0, buffers=self.arguments.sync_buffers_at_start)
        if self.arguments.static_graph:
            self._set_static_graph()

    def _connect(self, groups: list[dist.ProcessGroup], *, together: bool = False) -> None:
        """Make what a pickle leaves out: the process groups, the compression, the reducer. `together`: all ranks do so."""
        compressor, timeout, transport, scaler, undo = self._setup
        self.process_group = groups[0]
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        partial = self.arguments.rules().find_unused_parameters
        settings: dict[str, Any] = {"partial": partial, "transport": transport, "scaler": scaler, "undo": undo}
        self.compression = Handle(compressor, groups, timeout, **settings)
        self._messages = self.compression.averager.engines.transport(self.device)
        self._copies = self._messages
        if together:
            verify(described(self._parameters_by_name(), compressor, self.arguments.rules()), self._messages)
        self.compression.bind(self.module)
        self._fill_buckets(together=together)

    def _fill_buckets(self, *, together: bool) -> None:
        """Make the reducer and the buckets of all parameters that train now. `together`: all ranks do so."""
        rules = self.arguments.rules()
        named, sparse = trained(self.module)
        averager = self.compression.averager
        averager.sparse = any(sparse)
        allocate = averager.allocator(self.device) if together else allocate_own
        parameters, names = list(named.values()), list(named)
        assignment = BucketAssignment(
            parameters, sparse, rules.caps, alias=rules.gradient_as_bucket_view, allocate=allocate
        )
        averages: Averager = averager if self._hook is None else HookAverager(*self._hook)
        with_whom = self._messages, averages, averager.engines.timeout, self._overlap or AT_END
        self.reducer = reducer = TorchReducer(parameters, names, assignment, rules, *with_whom)
        self._strays = Strays(named, self.reducer.hooks.nodes, self.module, REFRESH)
        self._forks = ForkGuard(self.reducer.hooks.nodes, weak_call(self.reducer.fills_buckets))
        self.timeline = self.reducer.timeline
        self._order = BucketOrder(assignment, names, self._messages, self.device, lambda: reducer.delivery.leave())
        self._lazy_init_ran = False
        if self._overlap is not None:
            self._bind_overlap(self._overlap)

    def refresh(self) -> None:
        """Average all parameters that train now. All ranks call it between steps, after adding, replacing or converting any.

        It makes new buckets and copies parameters from rank 0, as construction does. Residuals follow their
        parameters or these parameters' names. Residuals of parameters that no longer train are dropped. Change the
        optimizer yourself.

        Raises:
            RuntimeError: the ranks have different models, or a backward has not ended.
        """
        self.compression.averager.drain()
        self.reducer.require_finished()
        named = trained(self.module)[0]
        if self._compresses:
            refuse_inside(self.module, named.values())
        self._take_devices()
        if self.arguments.init_sync:
            verify(described(self._parameters_by_name(), self._setup_now[0], self.arguments.rules()), self._messages)
        for handle in {self.compression, *(each for each in self._hook or () if isinstance(each, Handle))}:
            handle.bind(self.module, changed=True)
        self.reducer.hooks.detach()  # behind all that may refuse
        self._fill_buckets(together=True)
        if self.arguments.init_sync:
            self.copy_states(0, buffers=False)

    def _parameters_by_name(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}

    @property
    def _averager(self) -> CompressedAverager | None:
        """The compression that averages; None where a hook that is not ours does."""
        averager = self.reducer.averager
        return averager.own if isinstance(averager, HookAverager) else self.compression.averager

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._order.agreed

    def last_step(self) -> StepTimes | None:
        """Return the parts of the last synchronized step's seconds.

        Returns:
            The times of the step; None before the first step.
        """
        return self.timeline.last

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward from its outputs averages the gradients, unless inside `no_sync`."""
        with record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._compresses:
            refuse_around(self)
        if not self._lazy_init_ran:
            self._setup_in_backward_optimizers()
            self._lazy_init_ran = True
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._forks.check()
            self._look_for_strays()
            self.reducer.require_finished()
        if work := Join.notify_join_context(self):
            work.wait()
            active = float(work.result()[0]) / self.process_group.size()
            self.reducer.share = 1.0 if self.divide_by_initial_world_size or self._hook else active
        self.sync_buffers(candidate=True)  # first: one rank may evaluate alone, as with torch's
        if torch.is_grad_enabled() or self._join_config.enable:
            self.agree_on_order()
        if self._join_config.enable:
            self.backward_is_synced(joined=False)
        if self._overlap is not None:
            self._overlap.forward_begins(joins=self._join_config.enable)
        self.compression.forward_begins()
        self.timeline.forward_begins()
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), True)
            return moved[0], moved_kwargs[0]
        return inputs, kwargs

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        waited = 0.0 if self._overlap is None else self._overlap.forward_ends()
        self.timeline.forward_ends(waited, self.reducer.delivery.now())
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync != synced:  # setting a module's attribute is dear
            self.require_forward_param_sync = synced
        if not synced:
            if torch.is_grad_enabled():
                self.reducer.pause()
            return output
        self.reducer.expect_backward()
        if not self.reducer.watches or transformed():  # there the first gradient tells that a backward begins
            return output
        return watched(output, self.reducer, clone=self._ddp_sink_clone)

    def _look_for_strays(self) -> None:
        """Now and then: whether parameters train that are in no bucket. Raises RuntimeError where backward missed some."""
        if self.process_group.size() == 1:
            return
        self._strays.check(lambda: trained_now(self.module)[0])
        if self.reducer.unfinished:
            self._strays.search(trained_now(self.module)[0])
            self._strays.refuse_replaced()

    @outside_transforms
    def agree_on_order(self) -> None:
        """Between steps: buckets for the order in which gradients get ready, where it is time to look."""
        hooked, dynamic = self._hook is not None, self.reducer.rules.dynamic
        self._order.update(self.reducer.finished, self._averager, hooked=hooked, dynamic=dynamic)
        if self._overlap is not None:
            self._overlap.update()

    @outside_transforms
    def sync_buffers(self, *, candidate: bool) -> None:
        """Make the buffers of all ranks those of one; `candidate`: it may be this one."""
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]  # a module may have replaced some
            source = agreed_rank(candidate, self._messages) if self._join_config.enable else 0
            copy_from(source, list(self.named_module_buffers.values()), self._copies)

    def copy_states(self, source: int, *, buffers: bool | None = None) -> None:
        """Make parameters, and buffers if they are synchronized, those of rank `source`."""
        wanted = self.forward_sync_buffers if buffers is None else buffers
        copy_from(source, list(states(self.module, buffers=wanted).values()), self._copies)

    def backward_is_synced(self, *, joined: bool) -> bool:
        """Return True if the other ranks' next backward averages gradients. All ranks ask, inside `join`."""
        mine = self.require_backward_grad_sync and not joined
        return bool(largest(int(mine), self._messages))

    def overlap(self, overlap: Overlap) -> None:
        """Let averages arrive while the next forward runs: `gradwire.overlap` asks for it, on all ranks."""
        if self._overlap is not None:
            raise RuntimeError(
                "the model is overlapped already, with another optimizer: one call of overlap() for each model, with a list "
                "of all its optimizers"
            )
        if self._hook is not None:
            raise RuntimeError("overlap() takes no model with a communication hook: make it with compressor=...")
        self._bind_overlap(overlap)
        self._overlap = self.reducer.delivery = overlap

    def _bind_overlap(self, overlap: Overlap) -> None:
        overlap.bind(self.reducer, self.compression.averager, self._order)
        self._copies = self._messages.separate()  # buffers queue behind no gradients

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._strays.due = True  # it may replace parameters, or their gradient nodes
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def load_state_dict(self, *arguments: Any, **named_arguments: Any) -> Any:
        """Load a state, as every module does; `assign=True` replaces parameters, which needs `refresh` then."""
        self._strays.due = True
        return super().load_state_dict(*arguments, **named_arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; those under way once their averages were used, without waiting."""
        if self._overlap is not None and self._overlap.pending:
            return self._overlap.clear(self.parameters(), to_none=set_to_none)
        super().zero_grad(set_to_none)

    def join_hook(self, **kwargs: Any) -> ShadowSteps:
        """Return the hook by which `join` runs this rank without inputs; `divide_by_initial_world_size` as in torch."""
        return ShadowSteps(self, kwargs.get("divide_by_initial_world_size", True))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a communication hook average the buckets. It can be called once per model.

        Args:
            state: the first argument of each call of the hook.
            hook: a function of (state, bucket): one of torch's or gradwire's, or your own.

        Raises:
            RuntimeError: the model has a hook or a compressor already, or it is overlapped.
        """
        if self._overlap is not None:
            raise RuntimeError("an overlapped model takes no hook: make it with compressor=..., which does the same")
        if self._hook is not None or self._setup[0] != "none":
            self._log_and_throw(
                RuntimeError,
                "register_comm_hook or register_builtin_comm_hook can only be called once, on a model made with "
                f"compressor='none'. This one has {self._hook[1] if self._hook else self._setup[0]}, and needs no attach: "
                "model.compression is its handle, whose swap() changes the compressor",
            )
        self._check_comm_hook(hook)  # last: gradwire's own makes its handle here
        if (handle_on := getattr(hook, "handle_on", None)) is not None:  # gradwire's own, which makes its state itself
            state = handle_on(self)
        self._hook = state, hook
        self.reducer.hand_over(HookAverager(state, hook))

    @property
    def _setup_now(self) -> tuple[Spec, timedelta | None, Decorator | None, Scaler | None, bool]:
        """The arguments for a handle like this model's, after swaps too."""
        (given, timeout, transport, *_), now = self._setup, self.compression
        spec = given if compressor_of(given) == now.compressor else now.compressor
        return spec, timeout, transport, now.scaler, now.averager.memory.undo

    def _place(self) -> dict[str, int | str]:
        """Return the place of this rank, as the compression's state stores it."""
        part = part_of(self.process_group)
        return {"world_size": self.process_group.size(), "rank": self.process_group.rank(), "part": part}

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        kept = {name: value for name, value in self.__dict__.items() if name not in LEFT_OUT}
        spec, timeout, *_, undo = self._setup_now
        kept |= {"compression": self.compression.state_dict(), "_setup": (spec, timeout, None, None, undo)}
        return kept | {"arguments": dataclasses.replace(self.arguments, process_group=None, device_mesh=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        compression = state.pop("compression")
        nn.Module.__setstate__(self, state)
        self._connect(self.arguments.groups())
        alike = not (compression["step"] and compression["parameters"])  # without residuals it is any rank's
        self.compression.load_state_dict({**compression, **(self._place() if alike else {})})
