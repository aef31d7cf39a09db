"""Where it plugs in: communication hooks for other people's training loops."""

from ..ddp_core import BucketStats, Handle, Stats
from .advice import Advice, advise
from .frameworks.accelerate import accelerate
from .frameworks.gathered_state import GatheredState
from .fsdp import ShardHandle
from .plan import Plan, plan, ready_order
from .torch_ddp import attach, comm_hook, compress_bucket

__all__ = [
    "Advice",
    "BucketStats",
    "GatheredState",
    "Handle",
    "Plan",
    "ShardHandle",
    "Stats",
    "accelerate",
    "advise",
    "attach",
    "comm_hook",
    "compress_bucket",
    "plan",
    "ready_order",
]
