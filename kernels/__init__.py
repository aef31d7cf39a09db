"""The arithmetic of compressors: one public function an operation, the fastest available backend behind it.

Every operation takes flat contiguous tensors, writes into tensors it is given, and has a pure-torch body that is both the
fallback and the oracle. `backends()` tells what runs here; `GRADWIRE_KERNELS=reference` or `use_backend("reference")`
choose by hand.
"""

from . import cuda, native, triton_kernels
from .bases import normalize, orthogonalize
from .casting import cast_scaled, gather_scaled
from .dispatch import Backend, backends, operation, operations, register_backend, use_backend
from .finite import all_finite
from .low_rank import low_rank_finish, low_rank_left, low_rank_right
from .memory_pool import pool, temporary
from .operands import Block, Factors, Matrix, Places, Residual, Rows
from .quantization import dequantize_mean, quantize_blocks
from .rotation import rotate_blocks
from .selection import scatter_mean, select_largest
from .signs import sign_pack, sign_unpack_mean
from .zero_rows import clear_rows, mark_rows

__all__ = [
    "Backend",
    "Block",
    "Factors",
    "Matrix",
    "Places",
    "Residual",
    "Rows",
    "all_finite",
    "backends",
    "cast_scaled",
    "clear_rows",
    "cuda",
    "dequantize_mean",
    "gather_scaled",
    "low_rank_finish",
    "low_rank_left",
    "low_rank_right",
    "mark_rows",
    "native",
    "normalize",
    "operation",
    "operations",
    "orthogonalize",
    "pool",
    "quantize_blocks",
    "register_backend",
    "rotate_blocks",
    "scatter_mean",
    "select_largest",
    "sign_pack",
    "sign_unpack_mean",
    "temporary",
    "triton_kernels",
    "use_backend",
]
