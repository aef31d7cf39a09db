"""`gradwire kernels`: how fast each operation is on each backend, against memory and against torch's operators."""

from .command import KernelsConfig, kernels_command

__all__ = ["KernelsConfig", "kernels_command"]
