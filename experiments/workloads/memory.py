"""The most memory that a training takes on this rank."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure anew where the system can (CUDA, Linux); elsewhere the peak is the process's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (counters := Path("/proc/self/clear_refs")).exists():
        release_free_memory()
        counters.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak bytes: on the GPU, or resident in the process. What ranks share is divided among them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status, shares = _sizes(Path("/proc/self/status")), _sizes(Path("/proc/self/smaps_rollup"))
    if "VmHWM" in status:
        return status["VmHWM"] - (status["RssShmem"] - shares["Pss_Shmem"] if "Pss_Shmem" in shares else 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def release_free_memory() -> None:
    """Give back what an earlier training left: its cycles of objects, and what malloc keeps (that of glibc, on Linux)."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _sizes(listing: Path) -> dict[str, int]:
    """Bytes by name, of a listing of the kernel's; empty where there is none."""
    lines = listing.read_text().splitlines() if listing.exists() else []
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in words}
