"""When it goes: the engine that runs programs on process groups, the buckets that keep compressors' state, the reducer."""

from .assignment import assigned, caps_in_bytes
from .buckets import OWED, Bucket, Buckets
from .collectives import Waitable, averaged, exchange, pacing, start_sum
from .engine import DEFAULT_TIMEOUT, Engine
from .handle import Handle
from .job import Record
from .module import DistributedDataParallel
from .parameters import layout_of
from .stats import BucketStats, Stats
from .timeline import BucketTimes, StepTimes, trace

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
