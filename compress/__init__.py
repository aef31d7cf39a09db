"""What goes on the wire: compressors as programs, wrappers around them, and the registry of their names."""

from ..kernels import Residual
from .acp_powersgd import ACPPowerSGD
from .adacomp import AdaComp
from .adapters import Gathered, TwoShot
from .adaptive import Adaptive
from .build import Spec, WarmUp, compressor, compressors, specification, warm_up
from .chunktopk import ChunkTopK
from .dense import Dense
from .dgc import DGC
from .dropping import Dropping
from .feedback import AdamSpace, Damped, WorkerMomentum
from .guard import Guarded
from .half import BFloat16, Cast, Float16
from .hosts import Hosts
from .natural import Natural
from .onebit import OneBit
from .optimizers import tuned, without_momentum
from .per_tensor import PerTensor
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
from .qsgd import QSGD
from .quantized import FP8, Int2, Int4, Int8, Ternary
from .randomk import RandomK
from .registry import register
from .simulate import Simulation, Traffic, dry_run, most_rounds, simulate
from .terngrad import TernGrad
from .together import together
from .topk import TopK
from .wrappers import ErrorFeedback, Partition, Switch, Widen, warm_up_steps

__all__ = [
    "DGC",
    "FP8",
    "QSGD",
    "ACPPowerSGD",
    "AdaComp",
    "AdamSpace",
    "Adaptive",
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
    "Dropping",
    "ErrorFeedback",
    "Float16",
    "Gathered",
    "Guarded",
    "Hosts",
    "Int2",
    "Int4",
    "Int8",
    "Layout",
    "Natural",
    "OneBit",
    "Partition",
    "PerTensor",
    "PowerSGD",
    "Program",
    "RandomK",
    "ReduceScatter",
    "Residual",
    "Simulation",
    "Spec",
    "Switch",
    "TernGrad",
    "Ternary",
    "TopK",
    "Traffic",
    "TwoShot",
    "WarmUp",
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
    "warm_up",
    "warm_up_steps",
    "without_momentum",
]
