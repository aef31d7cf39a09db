"""gradwire: gradient compression with communication hooks for PyTorch data-parallel training.

>>> import gradwire
>>> gradwire.compressor("bf16")
BFloat16(inner=Dense(), sum='16bit')
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

_here = Path(__file__).parent
if not (_here / "compress").exists():  # imported from a clone, where the other layers lie beside this folder
    __path__.append(str(_here.parent))

from .compress import Compressor, Layout, Ranks, compressor, compressors, register, without_momentum
from .ddp_core import DistributedDataParallel, Handle, Stats, init_process_group, trace
from .hooks.handle_of import handle_of
from .hooks.torch_ddp import attach

if TYPE_CHECKING:
    from . import comm_hooks
    from .experiments.advice.advise import advise
    from .experiments.advice.recommendation import Advice
    from .experiments.bucket_plan import Plan, plan
    from .hooks.collectives.compress_group import compress_group
    from .hooks.comm_hook import comm_hook
    from .hooks.frameworks.accelerate import accelerate, accelerate_locally
    from .hooks.frameworks.accelerate_kwargs import AccelerateKwargs
    from .hooks.frameworks.gathered_state import GatheredState
    from .hooks.internet.client import Rendezvous
    from .hooks.local_sgd.local_steps import LocalSteps
    from .hooks.overlap import overlap
    from .hooks.report_loss import report_loss

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_FILES = {  # imported when they are first asked for
    "AccelerateKwargs": "hooks.frameworks.accelerate_kwargs",
    "Advice": "experiments.advice",
    "GatheredState": "hooks.frameworks.gathered_state",
    "LocalSteps": "hooks.local_sgd.local_steps",
    "Plan": "experiments.bucket_plan",
    "Rendezvous": "hooks.internet.client",
    "accelerate": "hooks.frameworks.accelerate",
    "accelerate_locally": "hooks.frameworks.accelerate",
    "advise": "experiments.advice",
    "comm_hook": "hooks.comm_hook",
    "compress_group": "hooks.collectives.compress_group",
    "overlap": "hooks.overlap",
    "plan": "experiments.bucket_plan",
    "report_loss": "hooks.report_loss",
}

if not TYPE_CHECKING:  # or mypy would believe that every name exists

    def __getattr__(name: str) -> object:
        """Import what few trainings need, and modules that import a framework, when it is first asked for."""
        if name in ("comm_hooks", "lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        if name not in _FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
        return found

    def __dir__() -> list[str]:
        """Return all public names, those not yet imported as well."""
        return sorted({*globals(), *__all__})


__all__ = [
    "AccelerateKwargs",
    "Advice",
    "Compressor",
    "DistributedDataParallel",
    "GatheredState",
    "Handle",
    "Layout",
    "LocalSteps",
    "Plan",
    "Ranks",
    "Rendezvous",
    "Stats",
    "__version__",
    "accelerate",
    "accelerate_locally",
    "advise",
    "attach",
    "comm_hook",
    "comm_hooks",
    "compress_group",
    "compressor",
    "compressors",
    "handle_of",
    "init_process_group",
    "overlap",
    "plan",
    "register",
    "report_loss",
    "trace",
    "without_momentum",
]
