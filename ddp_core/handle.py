"""One rank's compression of one model: what a communication hook calls, and what the user holds."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress import Compressor, Program, Spec, compressor
from ..compress.protocol import AllReduce
from ..compress.simulate import traffic
from .averaging.parts import Part, Parts, all_done, labelled
from .buckets.grad_bucket import Awaited, GradBucket
from .buckets.layout import as_real
from .buckets.sparse import SPARSE_ROUNDS, SparseBucket
from .engine.engine import DEFAULT_TIMEOUT, Engine
from .engine.sums import Way
from .measure.stats import BucketStats, Records, Stats
from .measure.step import Step
from .memory import checkpoint
from .memory.model_memory import Buckets

AT_EXIT = timedelta(seconds=5)
AT_SAVING = timedelta(minutes=1)  # that buckets under way may take, after a backward that did not come to its end


class Handle:
    """The compression of a model's gradients on this rank.

    Made by `gradwire.attach` or `gradwire.comm_hook`. All ranks make one, with the same compressor, and call `swap` and
    `load_state_dict` at the same step. `partial`: backwards may leave parameters out (DDP's find_unused_parameters).
    """

    def __init__(
        self,
        spec: Spec,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        partial: bool = False,
    ) -> None:
        self._buckets = Buckets(compressor(spec), partial=partial)
        self._groups = [process_group] if isinstance(process_group, dist.ProcessGroup) else list(process_group or ())
        self._timeout = timeout
        self._engines: dict[tuple[torch.device, int], Engine] = {}
        self._bound = False
        self._names: dict[Tensor, str] = {}
        self._parts = Parts(self._buckets)
        self._known = object()  # made anew when what is known of buckets is forgotten
        self._step = Step()
        self._records = Records()
        self.at_close: list[Callable[[], None]] = []
        self._loaded_order: list[str] = []

    def bind(self, model: nn.Module) -> None:
        """Key the state by the names of `model`'s parameters; without it they are numbered as DDP hands them over.

        Raises ValueError where what is held for a parameter would have no name in the model.
        """
        model = model.module if isinstance(model, DistributedDataParallel) else model
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        saved = self._buckets.state_dict()
        renamed = {name: name for name in names.values()} if not self._names else {}
        renamed |= {old: names[parameter] for parameter, old in self._names.items() if parameter in names}
        if lost := sorted(set(saved["parameters"]) - set(renamed)):
            raise ValueError(f"the state has parameters that the model does not train: {', '.join(lost)}")
        self._names, self._bound = names, True
        self._reload(checkpoint.renamed(saved, renamed))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket over ranks; DDP's hook. The future holds the bucket's buffer, averaged in place."""
        if self._step.begins_with(bucket.index()):
            self.begin_step()
        future = self._programs(bucket)
        self._step.sent(bucket.index(), last=bucket.is_last())
        return future

    def expect_step(self, *, any_last: bool = False) -> None:
        """The next bucket for `reduce` is the first of a step, whatever its index; `any_last`: it may be the last, too."""
        self._step.expect(any_last=any_last)

    def average(self, bucket: GradBucket) -> Awaited:
        """Average a bucket of our own DDP, of the step that `begin_step` began."""
        return (self._sum(bucket) if bucket.scale != 1.0 else None) or self._programs(bucket)

    @property
    def sums(self) -> bool:
        """Whether gradients are only summed over several ranks; the same on all of them."""
        return self.scale != 1.0

    @property
    def scale(self) -> float:
        """What gradients may be multiplied by on their way into a bucket: the mean is then a sum."""
        return 1 / self._process_group().size() if self._buckets.averages else 1.0

    @property
    def compressor(self) -> Compressor:
        """The one in use."""
        return self._buckets.compressor

    @property
    def remembers(self) -> bool:
        """Whether what is given in one step may be kept for later ones, or has to bring out what was."""
        return self._buckets.remembers

    def swap(self, spec: Spec) -> None:
        """Go on with another compressor from the next step; nothing held back is lost. All ranks swap at one step."""
        self._buckets.replace(compressor(spec))
        self._forget_parts()

    def rescale(self, factor: float) -> None:
        """Multiply what is held back, when the loss scale has changed: it was scaled with the old one.

        After `scaler.update()`: `if (new := scaler.get_scale()) != old: handle.rescale(new / old)`. Raises ValueError for a
        factor that is not finite or not above 0, and RuntimeError between loading a state and the next backward.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"the factor is the new loss scale over the old one, above 0 and finite; got {factor}")
        self._buckets.rescale(factor)

    def stats(self) -> Stats:
        """Rounds, bytes and seconds of the last synced step and in total."""
        return self._records.stats()

    @property
    def programs(self) -> Sequence[BucketStats]:
        """What each bucket of the last synced step cost, or of the one under way so far, in the order sent."""
        return self._records.step

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs; safe with `torch.load(weights_only=True)`. Residuals differ by rank.

        {"gradwire": format, "compressor", "world_size", "rank", "step": synced backwards, "buckets": [[name]],
        "parameters": {name: {field: tensor}}}

        After a backward that did not come to its end it is the state before it, which the model's parameters belong to.
        Raises RuntimeError where buckets of such a backward are still under way after a minute.
        """
        group = self._process_group()
        return {**checkpoint.header(self.compressor, group.size(), group.rank()), **self._saved()}

    def _saved(self) -> dict[str, Any]:
        deadline = time.monotonic() + min(self._timeout, AT_SAVING).total_seconds()
        for engine in self._engines.values():
            engine.rest(deadline)
        torn = self._step.is_torn(failed=any(engine.failed for engine in self._engines.values()))
        return self._buckets.state_before() if torn else self._buckets.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict()`; training then is bit-identical to not having stopped.

        Raises ValueError, changing nothing, where it was saved with another compressor, rank or model.
        """
        group = self._process_group()
        checkpoint.check(saved, checkpoint.header(self._buckets.compressor, group.size(), group.rank()))
        if self._bound:
            checkpoint.check_parameters(saved, self._buckets.compressor, self._names, group.size(), group.rank())
        self._reload(saved)
        if saved["step"] > 1:
            self._loaded_order = [name for names in saved["buckets"] for name in names]

    def loaded_order(self) -> Sequence[str]:
        """The parameters in the order of a state that has just been loaded, if it is not the first step's; told once."""
        order, self._loaded_order = self._loaded_order, []
        return order

    def __getstate__(self) -> dict[str, Any]:
        """Without threads and process groups; a copy reduces on the default group."""
        settings = {"compressor": self.compressor, "timeout": self._timeout, "partial": self._buckets.partial}
        return {**settings, "names": self._names, "bound": self._bound, "state": self._saved()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Handle.__init__(self, state["compressor"], None, state["timeout"], partial=state["partial"])
        self._names, self._bound = state["names"], state["bound"]
        self._buckets.load_state_dict(state["state"])

    def close(self) -> None:
        """End the threads and process groups that the hook made; training with it is over."""
        for engine in self._engines.values():
            engine.close()
        for end in self.at_close:
            end()

    def _process_group(self) -> dist.ProcessGroup:
        if not self._groups:
            if not dist.is_initialized():
                raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
            assert dist.group.WORLD is not None
            self._groups = [dist.group.WORLD]
        return self._groups[0]

    def begin_step(self) -> None:
        """The first bucket of a synced step comes next."""
        self._buckets.settle()
        self._step.begin()
        self._buckets.step += 1
        self._records.begin_step()

    def end_step(self) -> None:
        """All averages of the step that `begin_step` began have been handed out."""
        self._step.end()

    def _sum(self, bucket: GradBucket) -> Awaited | None:
        """The average of gradients that came divided, where it takes no program."""
        way = bucket.way
        if not isinstance(way, Way) or way.known is not self._known or way.buffer is not bucket.buffer():
            way = self._way(bucket)
            bucket.way = way if len(bucket.parameters()) == len(bucket.members) else None  # parts of it lie elsewhere
        started = way.engine.sum(way.flat, way.buffer, way.cost, way.label, way.shared) if way.alone else None
        if started is not None:
            self._records.step.append(BucketStats(way.names, way.elements, started.record))
        return started

    def _way(self, bucket: GradBucket) -> Way:
        engine, flat, parts = self._met(bucket)
        layout = parts[0].bucket.layout
        label = partial(labelled, bucket.number, layout.names)
        cost = traffic(AllReduce(flat, "sum"), engine.group.size())
        shared = bucket.shared if bucket.shared is not None and bucket.shared.flat is flat else None
        alone = len(parts) == 1
        return Way(self._known, bucket.buffer(), flat, shared, engine, alone, layout.names, layout.numel, cost, label)

    def _met(self, bucket: dist.GradBucket | GradBucket) -> tuple[Engine, Tensor, Sequence[Part]]:
        """What averages a bucket, its gradients as flat real numbers, and our buckets in it."""
        buffer, index = bucket.buffer(), bucket.index()
        engine, flat = self._engine(buffer.device, index), as_real(buffer)
        return engine, flat, self._parts.of(bucket, flat, engine, self._name)

    def _programs(self, bucket: dist.GradBucket | GradBucket) -> torch.futures.Future[Tensor]:
        """The average of a bucket, by a program for each of ours in it."""
        buffer = bucket.buffer()
        if buffer.is_sparse and isinstance(bucket, SparseBucket):
            return self._submit_sparse(bucket)
        scaled = getattr(bucket, "scale", 1.0) != 1.0
        engine, flat, parts = self._met(bucket)
        futures = [self._submit(engine, part, bucket.index(), flat, buffer, scaled) for part in parts]
        if len(futures) == 1 or flat.is_cuda:
            return futures[-1]  # on the side stream the last part ends last, and its future knows the device
        return all_done(futures, buffer)

    def _submit(
        self, engine: Engine, part: Part, index: int, flat: Tensor, buffer: Tensor, scaled: bool
    ) -> torch.futures.Future[Tensor]:
        program = part.reduce(flat, self._buckets.step - 1, buffer, scaled, not scaled and self._buckets.watched)
        return self._run(engine, program, index, part.bucket.layout.names, part.bucket.layout.numel)

    def _submit_sparse(self, bucket: SparseBucket) -> torch.futures.Future[Tensor]:
        engine = self._engine(bucket.buffer().device, bucket.number)
        engine.prepare(SPARSE_ROUNDS)
        world_size, watched = self._process_group().size(), self._buckets.watched
        program = self._buckets.reduce_sparse(bucket.buffer(), world_size, watched)
        names = tuple(map(self._name, bucket.parameters()))
        elements = sum(parameter.numel() for parameter in bucket.parameters())
        return self._run(engine, program, bucket.number, names, elements)

    def _run(
        self, engine: Engine, program: Program[Tensor], index: int, names: tuple[str, ...], elements: int
    ) -> torch.futures.Future[Tensor]:
        label = labelled(index, names)
        future, record = engine.submit(program, label, at_once=self._buckets.averages)
        self._records.step.append(BucketStats(names, elements, record))
        return future

    def _engine(self, device: torch.device, index: int) -> Engine:
        """The engine of a bucket: one for each device and process group, among which buckets go in turn."""
        self._process_group()
        place = index % len(self._groups)
        if (device, place) not in self._engines:
            engine = Engine(self._groups[place], device, self._timeout)
            weakref.finalize(self, engine.close, AT_EXIT)  # a thread inside torch would abort the interpreter
            self._engines[device, place] = engine
        return self._engines[device, place]

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            self._names[parameter] = str(len(self._names))
        return self._names[parameter]

    def _reload(self, saved: Mapping[str, Any]) -> None:
        self._buckets.load_state_dict(saved)
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._records.end_step()
        self._parts, self._known = Parts(self._buckets), object()
        self._step.end()
