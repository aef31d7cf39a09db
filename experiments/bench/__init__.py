"""The benchmark of DistributedDataParallel, and the difference between two of its files."""

from .command import bench_command
from .config import BenchConfig
from .diff import DiffConfig, diff_command

__all__ = ["BenchConfig", "DiffConfig", "bench_command", "diff_command"]
