"""gradwire: gradient compression with communication hooks for PyTorch data-parallel training.

>>> import gradwire
>>> gradwire.compressor("bf16")
BFloat16(inner=Dense())
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_here = Path(__file__).parent
if not (_here / "compress").exists():  # imported from a clone, where the other layers lie beside this folder
    __path__.append(str(_here.parent))

from .compress import Compressor, Layout, compressor, compressors, register, without_momentum
from .ddp_core import DistributedDataParallel, LocalSteps, Rendezvous, overlap, trace
from .hooks import Advice, Handle, Plan, Stats, advise, attach, comm_hook, plan

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "Advice",
    "Compressor",
    "DistributedDataParallel",
    "Handle",
    "Layout",
    "LocalSteps",
    "Plan",
    "Rendezvous",
    "Stats",
    "__version__",
    "advise",
    "attach",
    "comm_hook",
    "compressor",
    "compressors",
    "overlap",
    "plan",
    "register",
    "trace",
    "without_momentum",
]
