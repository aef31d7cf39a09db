"""WHEN and HOW it goes: reducer, buckets, what compressors remember, engine, transports, our DistributedDataParallel."""

from .averaging.sharded import ShardAverager
from .backward.graph import gradient_node
from .backward.messages import taken
from .backward.output_nodes import watched
from .backward.strays import Strays
from .buckets.assignment import assigned, caps_in_bytes
from .buckets.layout import layout_of, plain
from .engine.driver import FuturePending
from .engine.engine import DEFAULT_TIMEOUT, Engine
from .handle import Handle
from .local_steps.local_steps import LocalSteps
from .local_steps.outer import outer
from .measure.stats import Stats
from .measure.step import BucketStats
from .measure.trace import trace
from .memory.loss_scale import LossScale, Scaler
from .module import DistributedDataParallel
from .overlapping import overlap
from .torch_face.arguments import trained_now
from .torch_face.nested import refuse_inside
from .transport.collectives import (
    averaged,
    exchange,
    fan_in,
    fan_out,
    largest_and_sum,
    start_all_gather,
    start_all_to_all,
    start_scatter,
    start_sum,
)
from .transport.host_segment import obstacle
from .transport.launchers import adopt_launcher, init_process_group
from .transport.paced import Link, Paced
from .transport.process_group import ProcessGroup
from .transport.protocol import Decorator, Pending, Transport
from .transport.rendezvous import Rendezvous
from .transport.rendezvous import keep as keep_rendezvous
from .transport.torch_backend import LEAST_TORCH
from .transport.torch_backend import register as register_backend
from .watching.folder import reports_in
from .watching.watch import Observed, Watch

__all__ = [
    "DEFAULT_TIMEOUT",
    "LEAST_TORCH",
    "BucketStats",
    "Decorator",
    "DistributedDataParallel",
    "Engine",
    "FuturePending",
    "Handle",
    "Link",
    "LocalSteps",
    "LossScale",
    "Observed",
    "Paced",
    "Pending",
    "ProcessGroup",
    "Rendezvous",
    "Scaler",
    "ShardAverager",
    "Stats",
    "Strays",
    "Transport",
    "Watch",
    "adopt_launcher",
    "assigned",
    "averaged",
    "caps_in_bytes",
    "exchange",
    "fan_in",
    "fan_out",
    "gradient_node",
    "init_process_group",
    "keep_rendezvous",
    "largest_and_sum",
    "layout_of",
    "obstacle",
    "outer",
    "overlap",
    "plain",
    "refuse_inside",
    "register_backend",
    "reports_in",
    "start_all_gather",
    "start_all_to_all",
    "start_scatter",
    "start_sum",
    "taken",
    "trace",
    "trained_now",
    "watched",
]
