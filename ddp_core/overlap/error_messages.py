"""The messages of overlapped steps to users; optimizers that cannot be overlapped are refused by partial_step.py."""

from __future__ import annotations

from collections.abc import Sequence

from ..reducer.error_messages import shown

COMPILED = (
    "torch.compile or TorchScript is in use, and takes parameters unseen: with gradwire.overlap() each forward waits for "
    "all updates before it begins, so that only the time between backward and forward hides communication"
)

CLOSURE = (
    "an overlapped optimizer takes no closure: call loss.backward() before step(), or use the optimizer without "
    "gradwire.overlap()"
)

CAPTURED = (
    "gradwire.overlap() cannot be captured in a CUDA graph, which would wait for nothing: capture without overlap(), or "
    "with order='synchronous'"
)


def unseen(names: Sequence[str]) -> str:
    """Parameters that got gradients from a forward that did not wait for their update."""
    return (
        f"parameters {shown(names)} got gradients, though forward was not seen to use them while their update was on its "
        "way. Where only code after forward has used them, nothing is wrong. C++ extensions and torch.func's transforms use "
        "parameters unseen, and take the values from before the update: call the optimizer's drain() before such a forward, "
        "or pass order='synchronous' to gradwire.overlap()"
    )


def synchronous(reason: str) -> str:
    """Why steps wait at the end of backward after all."""
    return f"with {reason} gradwire.overlap() does not overlap: steps wait at the end of backward"


def raised(error: Exception, names: Sequence[str]) -> str:
    """The optimizer raised in a late update."""
    return f"the optimizer's step raised for {shown(names)}, which may be half updated: {type(error).__name__}: {error}"


def not_updated(why: str, made: Sequence[str], pending: Sequence[str]) -> str:
    """An average did not come while updates were under way. `made`, `pending`: parameters after and before their step."""
    after = (
        f"the optimizer's step was made for {shown(made)}" if made else "the optimizer's step was made for no parameter"
    )
    return (
        f"{why}. Apart from that each parameter is as before or as after its update: {after}; it was not made for "
        f"{shown(pending)}, which are as before it. Load a checkpoint into a new DistributedDataParallel"
    )


def forked(names: Sequence[str]) -> str:
    """A forked process uses what is on its way to its parent."""
    return (
        f"this process was forked while the averages of {shown(names)} were on their way, which come to the parent alone: "
        "call the optimizer's drain() before such a fork, or start the process by spawn"
    )


def not_ours(model: object) -> str:
    """A model whose reducer is not gradwire's."""
    return (
        f"gradwire.overlap() takes a model wrapped in gradwire.DistributedDataParallel, got {type(model).__name__}: torch's "
        "waits for all gradients at the end of backward. Wrap the module in gradwire's, with compressor=... in place of "
        "gradwire.attach()"
    )
