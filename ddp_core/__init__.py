"""WHEN and HOW it goes: reducer, buckets, what compressors remember, engine, transports, our DistributedDataParallel."""

from .buckets.assignment import assigned, caps_in_bytes
from .buckets.grad_bucket import layout_of, plain
from .engine.engine import Engine
from .engine.lanes import FuturePending
from .handle import Handle
from .measure.stats import Stats
from .measure.step import BucketStats
from .measure.timeline import trace
from .memory.rescaled_residuals import Scaler
from .module import DistributedDataParallel
from .observed import Observed
from .reducer.autograd import gradient_node, keep_from_compiler, watched
from .reducer.error_messages import removed
from .reducer.stray_gradients import Strays
from .torch_compat.arguments import refuse_inside, refuse_parts, share_model, trained_now
from .transport.host_memory import obstacle
from .transport.launchers import adopt_launcher, init_process_group
from .transport.paced import Link, Paced
from .transport.process_group import ProcessGroup, over
from .transport.protocol import DEFAULT_TIMEOUT, Decorator, Pending, Transport
from .transport.rank_messages import ask, exchange
from .transport.torch_groups import start_all_gather, start_all_to_all, start_scatter, start_sum

__all__ = [
    "DEFAULT_TIMEOUT",
    "BucketStats",
    "Decorator",
    "DistributedDataParallel",
    "Engine",
    "FuturePending",
    "Handle",
    "Link",
    "Observed",
    "Paced",
    "Pending",
    "ProcessGroup",
    "Scaler",
    "Stats",
    "Strays",
    "Transport",
    "adopt_launcher",
    "ask",
    "assigned",
    "caps_in_bytes",
    "exchange",
    "gradient_node",
    "init_process_group",
    "keep_from_compiler",
    "layout_of",
    "obstacle",
    "over",
    "plain",
    "refuse_inside",
    "refuse_parts",
    "removed",
    "share_model",
    "start_all_gather",
    "start_all_to_all",
    "start_scatter",
    "start_sum",
    "trace",
    "trained_now",
    "watched",
]
