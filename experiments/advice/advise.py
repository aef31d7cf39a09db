"""`gradwire.advise`: measures a training and its network, tries what looks best, and tells whether and how to compress."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...compress import Optimizers, Ranks, compressor
from ...compress.builder.spelling import whole_number
from ...compress.state.shares import ranks_given, ranks_seen
from ...ddp_core import DEFAULT_TIMEOUT, Decorator, over
from ...ddp_core.averaging.engines import Engines
from ...ddp_core.measure.clock import clock_of
from ...ddp_core.transport.protocol import time_limit
from ...ddp_core.transport.torch_groups import orders_streams
from ..bucket_plan import bucket_layouts
from .arithmetic import Arithmetic, copy_seconds, gradient_pool, measured_arithmetic, sampled
from .candidates import BACKWARD, MUON, PRIORITY, TWO_LEVELS, UNCOMPRESSED, Candidate, candidates, family, narrowed
from .network import Kind, Network
from .predict import Measured, buckets, memory, peak_bytes, predicted, requests_on
from .rank_group import RankGroup, tried
from .recommendation import Advice, Forecast, megabytes
from .rule import Choice, Rule, few
from .shared_cores import Work
from .timed_training import Computation, Loss, Training
from .trials import TRIAL_SECONDS, Trials, checked_seconds, confirmed

FEWEST_TIMED, MOST_TIMED = 2, 20  # steps whose computation is measured
STEP_BUDGET = 10.0  # seconds for them
COPIES = 3  # of the parameters that computation goes over in a step: they, gradients, what an optimizer remembers


def advise(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    optimizer: Optimizers,
    *,
    compressors: Sequence[str] | None = None,
    hosts: Iterable[int] = (),
    tolerance: float = Rule.tolerance,
    worthwhile: float = Rule.worthwhile,
    trial_seconds: float = TRIAL_SECONDS,
    bucket_mb: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    transport: Decorator | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Advice:
    """Measure the ranks of a training, and recommend whether and how to compress its gradients. All ranks call it.

    It takes the compressors whose expected loss is within `tolerance` of `none`'s, in the order of losses. Each is worth it
    if it makes a step `worthwhile` times as fast as the last one before it that was. The last one of 8 bits or more that is
    worth it is recommended, and the one behind it is named as the next step. If none is worth it, that is no compression.

    Args:
        model: the model. Steps run on a copy, with the weights of rank 0: model, optimizer and torch's random state do not
            change.
        loss_fn: a function of (model, batch) that returns the loss, a scalar, of the model that it is given.
        batch: the second argument of `loss_fn`.
        optimizer: the optimizer of the model, or a list.
        compressors: the compressors to choose from; by default those with a studied loss.
        hosts: other numbers of hosts to predict steps for, from the links between hosts.
        tolerance: the largest expected loss above that of `none`, as a fraction.
        worthwhile: the smallest speed-up for which to compress.
        trial_seconds: the seconds in which copies train some steps to test the predictions; 0 only predicts.
        bucket_mb: the bucket size of DistributedDataParallel in MiB.
        process_group: the ranks that take part; by default the default group.
        transport: a function that wraps each transport, for example in an emulated link. Each rank then counts as a
            host.
        timeout: limit of each wait for other ranks.

    Returns:
        The advice, the same on every rank. Printing it shows a table, the recommendation and the line to paste.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the group has one rank, a compressor or an option is wrong, or `loss_fn` raised on another rank.
    """
    began = time.perf_counter()
    device, group = _device(model), process_group or (dist.group.WORLD if dist.is_initialized() else None)
    checked = partial(_checked, tolerance, worthwhile, hosts, compressors, optimizer, trial_seconds, timeout)
    rule, sizes, asked, kind = checked() if group is None else tried(checked, over(group, device))
    here = _here(group, device, transport)
    trained = [each for each in model.parameters() if each.requires_grad]
    if compressors is None and trained and all(each.dtype.itemsize == 2 for each in trained):
        asked = [each for each in asked if each.spec not in ("bf16", "fp16")]  # which would send as many bytes
    rule = replace(rule, wide_only=kind == MUON, few=few(each.spec for each in asked))
    specs, numbers = [each.spec for each in asked], sum(map(Tensor.numel, trained))
    asked_for = {"compressors": specs, "hosts": sizes, "bucket_mb": bucket_mb, "trial_seconds": trial_seconds}
    _agree(here, {"numbers": numbers, "optimizer": kind, **asked_for, **vars(rule)})
    _check_links(here, sizes)
    with here.selected:
        bare = model.module if isinstance(model, TorchDDP) else model
        copied = partial(Training, bare, loss_fn, batch, optimizer, clock_of(here.device))
        training = here.tried(copied)
        whole = all(here.gather(here.tried(training.first_step)))
        computation = _computation(training, here)
        between_hosts = asked if here.ranks.per_host > 1 else []  # the same compressors, on two levels
        offered = [*asked, *(replace(each, spec=TWO_LEVELS + each.spec) for each in between_hosts)]
        offered, left_out = _fitting(offered, training, computation, here, bucket_mb)
        measured = _measured(training, computation, offered, here, bucket_mb, transport, timeout)
        everywhere = [here.ranks, *(Ranks(count * here.ranks.per_host, 0, here.ranks.per_host) for count in sizes)]
        now, *elsewhere = (_forecast(measured, offered, ranks, kind, rule, bucket_mb) for ranks in everywhere)
        trials = Trials(here, copied, bucket_mb, transport, timeout, unused=not whole)
        whole_steps = all(here.gather(training.seen))  # a compiled model would be compiled anew for each trial
        del training
        now, failures = confirmed(now, rule, trials.step, trial_seconds if whole_steps else 0.0)
        elsewhere = [each.only(now.rows, rule) for each in elsewhere]
        seconds = max(here.gather(time.perf_counter() - began))
    on_cpus = here.one_host and device.type == "cpu"
    return Advice(measured, now, tuple(elsewhere), kind, seconds, tuple(failures), tuple(left_out), on_cpus)


def _checked(
    tolerance: float,
    worthwhile: float,
    hosts: Iterable[int],
    specs: Sequence[str] | None,
    optimizer: Optimizers,
    trial_seconds: float,
    timeout: timedelta,
) -> tuple[Rule, list[int], list[Candidate], str]:
    """Return what is asked for. Raises ValueError where it cannot be; two levels are tried by themselves."""
    checked_seconds(trial_seconds)
    time_limit(timeout)
    rule, expected = Rule(tolerance, worthwhile), "hosts are whole numbers, at least 2, such as [16, 64]"
    sizes = [whole_number(count, expected, least=2) for count in hosts]
    for spec in specs or ():
        if ranks_given(compressor(spec)) is not None:
            raise ValueError(
                f"{spec} is tried without being asked for where hosts have several ranks: name the compressor between "
                f"hosts, as in {spec.rpartition('+')[2] if '+' in spec else 'none'}"
            )
    return rule, sizes, candidates(specs, optimizer), family(optimizer)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))


def _here(group: dist.ProcessGroup | None, device: torch.device, transport: Decorator | None) -> RankGroup:
    if group is None:
        raise RuntimeError(
            "advise() measures the network of a process group, and there is none yet: call "
            "torch.distributed.init_process_group() first, on every rank"
        )
    if group.size() < 2:
        raise ValueError("advise() needs two ranks or more, and this process group has one: start it with torchrun")
    return RankGroup.found(group, device, one_level=transport is not None)


def _agree(here: RankGroup, asked: Mapping[str, Any]) -> None:
    """Raise ValueError on every rank where ranks ask for different things."""
    ranks = here.gather(asked)
    for rank, other in enumerate(ranks):
        for name, first in ranks[0].items():
            if other[name] != first:
                raise ValueError(
                    f"the ranks ask for different advice, of {name}: rank 0 has {first}, rank {rank} has {other[name]}; "
                    "give all of them the same model, optimizer and options"
                )


def _check_links(here: RankGroup, sizes: Sequence[int]) -> None:
    """Raise ValueError where other numbers of hosts would be predicted from links inside a host."""
    if sizes and here.one_host:
        raise ValueError(
            f"hosts={sizes} needs ranks on two hosts or more, and all of these are on one: start some on two, or "
            "emulate a network by gradwire advise --link 10gbit"
        )


def _computation(training: Training, here: RankGroup) -> Computation:
    """Return the computation of the slowest rank, while all of them compute."""
    began = time.perf_counter()
    steps = [here.tried(partial(training.step, notes_use=True))]
    slowest = max(here.gather(time.perf_counter() - began))
    for _ in range(max(FEWEST_TIMED, min(MOST_TIMED, int(STEP_BUDGET / max(slowest, 1e-3))))):
        steps.append(here.tried(training.step))
    mine = training.computation(steps)
    ranks = [
        Computation(Work(**forward), Work(**backward), Work(**optimizer), ready, needed)
        for forward, backward, optimizer, ready, needed in here.gather(list(asdict(mine).values()))
    ]
    return max(ranks, key=lambda each: each.seconds)


def _fitting(
    offered: Sequence[Candidate], training: Training, computation: Computation, here: RankGroup, bucket_mb: float | None
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates that fit in the memory of each rank, beside the copy that is trained, and why others do not.

    What fits with residuals in 8 bits is tried so.
    """
    free = here.free_memory()
    ready = {name: training.parameters[name] for name in computation.ready}

    def peak(spec: str) -> int:
        return peak_bytes(spec, tuple(bucket_layouts(ready, bucket_mb, ranks_seen(compressor(spec), here.ranks))))

    kept, left_out = list[Candidate](), list[str]()
    for each in offered:
        if free is None or each.spec.removeprefix(TWO_LEVELS) in UNCOMPRESSED or (needed := peak(each.spec)) <= free:
            kept.append(each)
            continue
        narrow, instead = narrowed(each), ""
        if narrow is not None and peak(narrow.spec) <= free:
            kept += [] if narrow.spec in {other.spec for other in offered} else [narrow]
            instead = f": {narrow.spec} is tried instead"
        needs = f"{each.spec} takes {megabytes(needed)} on each rank"
        left_out.append(f"{needs}, and {megabytes(free)} are free beside the model and its copy{instead}")
    return kept, left_out


def _measured(
    training: Training,
    computation: Computation,
    offered: Sequence[Candidate],
    here: RankGroup,
    bucket_mb: float | None,
    transport: Decorator | None,
    timeout: timedelta,
) -> Measured:
    """Measure all parts of a step."""
    arithmetic, copy = _arithmetic(training, computation, offered, here, bucket_mb)
    rings = not orders_streams(here.group, here.device)
    by_need = here.device.type == "cpu" or not rings  # with Gloo a GPU's host waits in backward
    shapes = {name: torch.empty_like(each, device="meta") for name, each in training.parameters.items()}
    measured = Measured(computation, shapes, arithmetic, {}, copy, here.ranks, here.cores, rings, by_need)
    engines = Engines([here.group], timeout, transport)
    try:
        costs = Network(engines.of(here.device, 0).transport, here.device, timeout, here.ranks.per_host).costs(
            _largest(measured, offered, bucket_mb)
        )
    finally:
        engines.close()
    return replace(measured, costs=costs)


def _arithmetic(
    training: Training, computation: Computation, offered: Sequence[Candidate], here: RankGroup, bucket_mb: float | None
) -> tuple[dict[str, Arithmetic], float]:
    """By specification, the mean over ranks, all of which are at it; and the seconds an element of copies into buckets."""
    clock, ranks = clock_of(here.device), replace(here.ranks, rank=here.group.rank())
    ready = {name: training.parameters[name] for name in computation.ready}
    layouts = sampled(bucket_layouts(ready, bucket_mb, ranks, here.device))
    elements = sum(parameter.numel() for parameter in ready.values())
    pool = gradient_pool(here.device, layouts[0].dtype, COPIES * elements)
    found = {}
    for each in offered:
        placed = [replace(layout, ranks=ranks_seen(compressor(each.spec), ranks)) for layout in layouts]
        dist.barrier(here.group)
        mine = here.tried(partial(measured_arithmetic, compressor(each.spec), placed, pool, clock))
        everywhere = here.gather([mine.phases, mine.cores])
        phases = tuple(statistics.mean(phase) for phase in zip(*(phases for phases, _ in everywhere), strict=True))
        found[each.spec] = Arithmetic(phases, statistics.mean(cores for _, cores in everywhere))
    copy = statistics.mean(here.gather(copy_seconds(layouts[-1], pool, clock)))
    return found, copy


def _largest(measured: Measured, offered: Sequence[Candidate], bucket_mb: float | None) -> dict[Kind, int]:
    """The largest payload of each kind of request."""
    found: dict[Kind, int] = {}
    for each in offered:
        for overlaps in (False, True):
            layouts, _ = buckets(measured, each.spec, measured.ranks, bucket_mb, overlaps=overlaps)
            for request in (request for layout in layouts for request in requests_on(each.spec, layout)):
                if request.kind[2] != "self":
                    found[request.kind] = max(found.get(request.kind, 0), request.payload_bytes)
    return found


def _forecast(
    measured: Measured, offered: Sequence[Candidate], ranks: Ranks, kind: str, rule: Rule, bucket_mb: float | None
) -> Forecast:
    numbers = sum(each.numel() for each in measured.parameters.values())
    choices = [
        Choice(
            each,
            order,
            predicted(measured, each.spec, order, ranks, bucket_mb),
            each.expected_loss(kind, numbers),
            memory(measured, each.spec, order, ranks, bucket_mb),
        )
        for each in offered
        for order in (BACKWARD, PRIORITY)
    ]
    return Forecast.ranked(ranks.world_size, ranks.per_host, choices, rule)
