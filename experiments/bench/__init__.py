"""The benchmark of DistributedDataParallel, and the difference between two of its files."""

from .command import bench_command
from .config import BenchConfig
from .diff import DiffConfig, diff_command
from .launchers import adopt_launcher

__all__ = ["BenchConfig", "DiffConfig", "adopt_launcher", "bench_command", "diff_command"]
