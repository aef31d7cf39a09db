"""What goes on the wire: compressors as programs, wrappers around them, and the registry of their names."""

from ..kernels import Residual
from .acp_powersgd import ACPPowerSGD
from .adapters import Gathered, TwoShot
from .build import Spec, compressor, compressors, specification
from .chunktopk import ChunkTopK
from .dense import Dense
from .feedback import AdamSpace, Damped, WorkerMomentum
from .half import BFloat16, Cast, Float16
from .onebit import OneBit
from .optimizers import tuned, without_momentum
from .powersgd import BatchedPowerSGD, PowerSGD
from .protocol import (
    AllGather,
    AllReduce,
    AllToAll,
    Codec,
    Compressor,
    DrawingCodec,
    Layout,
    Program,
    ReduceScatter,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from .quantized import Int4, Int8, Ternary
from .randomk import RandomK
from .registry import register
from .simulate import Simulation, Traffic, dry_run, most_rounds, simulate
from .together import together
from .topk import TopK
from .wrappers import ErrorFeedback, Partition, Switch, Widen, warm_up_steps

__all__ = [
    "ACPPowerSGD",
    "AdamSpace",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BFloat16",
    "BatchedPowerSGD",
    "Cast",
    "ChunkTopK",
    "Codec",
    "Compressor",
    "Damped",
    "Dense",
    "DrawingCodec",
    "ErrorFeedback",
    "Float16",
    "Gathered",
    "Int4",
    "Int8",
    "Layout",
    "OneBit",
    "Partition",
    "PowerSGD",
    "Program",
    "RandomK",
    "ReduceScatter",
    "Residual",
    "Simulation",
    "Spec",
    "Switch",
    "Ternary",
    "TopK",
    "Traffic",
    "TwoShot",
    "Widen",
    "WorkerMomentum",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "compressor",
    "compressors",
    "dry_run",
    "most_rounds",
    "reduce_scatter",
    "register",
    "simulate",
    "specification",
    "together",
    "tuned",
    "warm_up_steps",
    "without_momentum",
]
