"""When it goes: the engine that runs programs on process groups, and the buckets that keep compressors' state."""

from .buckets import OWED, Bucket, Buckets
from .collectives import averaged, exchange
from .engine import DEFAULT_TIMEOUT, Engine
from .job import Record

__all__ = ["DEFAULT_TIMEOUT", "OWED", "Bucket", "Buckets", "Engine", "Record", "averaged", "exchange"]
