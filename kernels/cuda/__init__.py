"""The operations in CUDA C++ for which the instructions of a warp pay: selection and orthonormal bases.

Optional: CuPy compiles the sources for the device that is there, and keeps the result in the user's cache folder. Dtypes
and ranks that the kernels do not know go to the next backend, which is logged once. Nothing here waits for the device, and
after a first call all of it can be captured in a CUDA graph. The same selection as the reference; bases span the same,
though their vectors may differ in sign. The results are the same every time.
"""

from __future__ import annotations

from ..dispatch import register_backend
from . import operations
from .module import NAME, probe

register_backend(NAME, "cuda", probe)

__all__ = ["NAME", "operations"]
