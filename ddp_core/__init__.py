"""When it goes: the engine that runs programs on process groups, the buckets that keep compressors' state, the reducer."""

from .buckets.assignment import assigned, caps_in_bytes
from .buckets.layout import layout_of
from .engine.engine import DEFAULT_TIMEOUT, Engine
from .engine.task import Record
from .handle import Handle
from .measure.stats import BucketStats, Stats
from .measure.timeline import BucketTimes, StepTimes, trace
from .memory.model_memory import OWED, Bucket, Buckets
from .module import DistributedDataParallel
from .transport.collectives import Waitable, averaged, exchange, pacing, start_sum

__all__ = [
    "DEFAULT_TIMEOUT",
    "OWED",
    "Bucket",
    "BucketStats",
    "BucketTimes",
    "Buckets",
    "DistributedDataParallel",
    "Engine",
    "Handle",
    "Record",
    "Stats",
    "StepTimes",
    "Waitable",
    "assigned",
    "averaged",
    "caps_in_bytes",
    "exchange",
    "layout_of",
    "pacing",
    "start_sum",
    "trace",
]
