"""When it goes: the engine that runs programs on process groups, the buckets that keep compressors' state, the reducer."""

from .assignment import assigned, caps_in_bytes
from .buckets import OWED, Bucket, Buckets
from .collectives import averaged, exchange
from .engine import DEFAULT_TIMEOUT, Engine
from .handle import Handle
from .job import Record
from .module import DistributedDataParallel
from .parameters import layout_of
from .stats import BucketStats, Stats

__all__ = [
    "DEFAULT_TIMEOUT",
    "OWED",
    "Bucket",
    "BucketStats",
    "Buckets",
    "DistributedDataParallel",
    "Engine",
    "Handle",
    "Record",
    "Stats",
    "assigned",
    "averaged",
    "caps_in_bytes",
    "exchange",
    "layout_of",
]
