"""Error messages of the reducer; the first words are torch's, so that a search finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ..engine.lanes import ProgramError

SHOWN = 8  # parameters named in an error

CREATE_GRAPH = (
    "backward(create_graph=True) through DistributedDataParallel averages the gradients over ranks, but not their "
    "graphs: a second derivative stays this rank's own. Average higher-order gradients yourself"
)


def shown(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def unfinished(absent: Mapping[int, str], rank: int, *, static: bool, watched: bool) -> str:
    """A synchronized backward did not bring all gradients, and another iteration begins.

    `absent`: names of the parameters without gradient, by index. `watched`: find_unused_parameters is on.
    """
    what = "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    if static:
        what += (
            "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then "
            "got unused in the second iteration. this is not compatible with static_graph set to True."
        )
    else:
        what += "your module has parameters that were not used in producing loss. " + (
            "Since `find_unused_parameters=True` is enabled, the loss did not depend on any output of `forward`"
            if watched
            else "Enable unused parameter detection by passing the keyword argument `find_unused_parameters=True`, and make "
            "sure that all `forward` function outputs participate in calculating loss"
        )
        what += (
            ". It also comes after a backward that raised an error: the ranks are then no longer in step, so load a "
            "checkpoint into a new DistributedDataParallel."
        )
    verbose = dist.get_debug_level() != dist.DebugLevel.OFF
    names = ", ".join(absent.values()) if verbose else shown(list(absent.values()))
    what += (
        f"\nParameter indices which did not receive grad for rank {rank}: {' '.join(map(str, absent))}"
        f"\nParameters which did not receive grad for rank {rank}: {names}"
    )
    advice = "\nTo have all names listed, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
    return what if verbose else what + advice


def twice(name: str, *, static: bool, passed_over: bool) -> str:
    """A parameter fired once more than it should."""
    if static:
        return (
            f"Your training graph has changed in this iteration: parameter {name} got more gradients than in the first "
            "one, which static_graph=True does not allow"
        )
    if passed_over:
        return (
            f"Expected to mark a variable ready only once, but parameter {name}, which took no part in the graph when "
            "backward began, got a gradient: find_unused_parameters=True does not see into checkpoints with "
            "use_reentrant=True. Use use_reentrant=False, or static_graph=True where every iteration is alike"
        )
    return (
        f"Expected to mark a variable ready only once, but parameter {name} got a second gradient in one backward: it is "
        "used outside forward, or in several re-entrant checkpoints. Pass static_graph=True where every iteration uses "
        "it alike, or checkpoint with use_reentrant=False"
    )


def late(name: str) -> str:
    """A gradient that comes after its step has been averaged."""
    return (
        f"parameter {name} got a gradient after this step's averages were handed out, from a second backward since the "
        "last forward of DistributedDataParallel: it stays this rank's own. Run one forward for each backward, or add "
        "the losses up before one backward; where such gradients are alike on all ranks, nothing is wrong"
    )


def replaced(names: Sequence[str], remedy: str) -> str:
    """Parameters that were averaged are others now, or have another gradient node."""
    return (
        f"parameters {shown(names)} were replaced or converted after the model was wrapped, as `.double()`, "
        f"load_state_dict(assign=True) and to_empty() do: their gradients are no longer averaged over ranks. {remedy}"
    )


def shared_view(name: str) -> str:
    """Two wrappers average a gradient in one backward, which is a view of the buckets of one of them."""
    return (
        "Detected at least one parameter gradient is not the expected DDP bucket view with gradient_as_bucket_view=True: "
        f"two DistributedDataParallel models average parameter {name} in one backward. Wrap one model around both, or leave "
        "gradient_as_bucket_view out of both"
    )


def added(names: Sequence[str], remedy: str) -> str:
    """Parameters train that did not when the model was wrapped."""
    return (
        f"parameters {shown(names)} were added or unfrozen after the model was wrapped: their gradients are not averaged "
        f"over ranks, and each rank trains them by itself. {remedy}"
    )


BYPASSED = (
    "parameters train with gradients that are not averaged over ranks: forward has not been called on "
    "DistributedDataParallel, but on its .module or on the bare model. Call forward on DistributedDataParallel"
)


COMPILED_AUTOGRAD = (
    "compiled autograd does not go with gradwire's DistributedDataParallel, whose hooks it would trace: leave "
    "torch._dynamo.config.compiled_autograd off, or use torch.nn.parallel.DistributedDataParallel, without compression, "
    "under torch._dynamo.config.optimize_ddp='python_reducer'"
)


def removed(names: Sequence[str]) -> str:
    """Gradients that came, and were gone before they could be averaged."""
    return (
        f"parameters {shown(names)} got gradients, and a hook has cleared these before they were averaged over ranks. An "
        "optimizer that steps inside backward, in register_post_accumulate_grad_hook, trains on this rank's own gradients: "
        "call optimizer.step() after backward, or use torch.distributed.optim._apply_optimizer_in_backward, which waits for "
        "the averages. A hook that drops a gradient fills it with zeros instead"
    )


def failed(index: int, names: Sequence[str], error: Exception) -> str:
    """A bucket's average did not come; the engine's own errors name the bucket already."""
    if isinstance(error, ProgramError):
        return str(error)
    return f"bucket {index} (parameters {shown(names)}): {type(error).__name__}: {error}"


def broken(why: str) -> str:
    """An iteration begins after one without averages."""
    return (
        "the averages of the step before did not all come, so the ranks are no longer in step: load a checkpoint into a "
        f"new DistributedDataParallel. Cause: {why}"
    )


def sparse(names: Sequence[str]) -> str:
    """Gradients that turned out to be sparse."""
    return (
        f"sparse gradients of {shown(names)}, which no nn.Embedding or nn.EmbeddingBag with sparse=True has announced: use "
        "these modules, or sparse=False"
    )
