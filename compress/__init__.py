"""Compressors as programs, wrappers around them, and the registry of their names."""

from ..kernels import Residual
from .algorithms.acp_powersgd import ACPPowerSGD
from .algorithms.adapters import Gathered, PerTensor, TwoShot
from .algorithms.dense import Dense
from .algorithms.dgc import DGC
from .algorithms.half import BFloat16, Cast, Float16
from .algorithms.onebit import OneBit
from .algorithms.powersgd import BatchedPowerSGD, PowerSGD
from .algorithms.quantized import Int2, Int4, Int8
from .algorithms.topk import TopK
from .builder.build import Spec, WarmUp, compressor, compressors, specification, warm_up
from .builder.optimizer_defaults import Optimizers, optimizers_of, tuned, without_momentum
from .builder.optimizer_given import report_optimizer
from .composed.adaptive import Adaptive
from .composed.hierarchical import Hierarchical
from .feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from .feedback.partition import Partition
from .feedback.switch import Switch, warm_up_steps
from .feedback.worker_momentum import WorkerMomentum
from .protocol.compressor import Codec, Compressor, Traits, traits_of, with_traits
from .protocol.layout import Layout, Ranks
from .protocol.registry import register
from .protocol.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Program,
    ReduceScatter,
    Scatter,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    together,
)
from .simulate import Simulation, Traffic, dry_run, most_rounds, simulate

__all__ = [
    "DGC",
    "ACPPowerSGD",
    "Adaptive",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BFloat16",
    "BatchedPowerSGD",
    "Broadcast",
    "Cast",
    "Codec",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "Float16",
    "Float32Arithmetic",
    "Gather",
    "Gathered",
    "Hierarchical",
    "Int2",
    "Int4",
    "Int8",
    "Layout",
    "OneBit",
    "Optimizers",
    "Partition",
    "PerTensor",
    "PowerSGD",
    "Program",
    "Ranks",
    "ReduceScatter",
    "Residual",
    "Scatter",
    "Simulation",
    "Spec",
    "Switch",
    "TopK",
    "Traffic",
    "Traits",
    "TwoShot",
    "WarmUp",
    "WorkerMomentum",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "compressor",
    "compressors",
    "dry_run",
    "most_rounds",
    "optimizers_of",
    "reduce_scatter",
    "register",
    "report_optimizer",
    "simulate",
    "specification",
    "together",
    "traits_of",
    "tuned",
    "warm_up",
    "warm_up_steps",
    "with_traits",
    "without_momentum",
]
