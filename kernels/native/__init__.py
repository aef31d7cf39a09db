"""The operations in C++ for CPUs: vector instructions chosen at run time, on `torch.get_num_threads()` threads.

Optional: `setup.py` builds the extension where it finds a compiler. Tensors of dtypes that it does not know go to the
next backend, which is logged once. The same selection and bits as the reference; sums differ by their rounding only, and are
the same for any number of threads.
"""

from ..dispatch import register_backend
from . import operations
from .operations import LARGEST_RANK, NAME, library, probe

__all__ = ["LARGEST_RANK", "NAME", "library", "operations"]

register_backend(NAME, "cpu", probe)
