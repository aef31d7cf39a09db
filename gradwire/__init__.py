"""gradwire: gradient compression with communication hooks for PyTorch data-parallel training.

>>> import gradwire
>>> gradwire.compressor("bf16")
BFloat16(inner=Dense())
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

_here = Path(__file__).parent
if not (_here / "compress").exists():  # imported from a clone, where the other layers lie beside this folder
    __path__.append(str(_here.parent))

from .compress import Compressor, Layout, compressor, compressors, register, without_momentum
from .ddp_core import DistributedDataParallel, LocalSteps, Rendezvous, init_process_group, overlap, trace
from .hooks import Advice, GatheredState, Handle, Plan, Stats, accelerate, advise, attach, comm_hook, plan

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

if not TYPE_CHECKING:  # for which they are modules like others

    def __getattr__(name: str) -> object:
        """`gradwire.lightning` and `gradwire.transformers`, which import a framework, once they are asked for."""
        if name in ("lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Advice",
    "Compressor",
    "DistributedDataParallel",
    "GatheredState",
    "Handle",
    "Layout",
    "LocalSteps",
    "Plan",
    "Rendezvous",
    "Stats",
    "__version__",
    "accelerate",
    "advise",
    "attach",
    "comm_hook",
    "compressor",
    "compressors",
    "init_process_group",
    "overlap",
    "plan",
    "register",
    "trace",
    "without_momentum",
]
