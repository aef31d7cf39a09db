"""Where it plugs in: communication hooks for other people's training loops."""

from ..ddp_core import BucketStats, Handle, Stats
from .advice import Advice, advise
from .fsdp import ShardHandle
from .plan import Plan, plan, ready_order
from .torch_ddp import attach, comm_hook, compress_bucket

__all__ = [
    "Advice",
    "BucketStats",
    "Handle",
    "Plan",
    "ShardHandle",
    "Stats",
    "advise",
    "attach",
    "comm_hook",
    "compress_bucket",
    "plan",
    "ready_order",
]
