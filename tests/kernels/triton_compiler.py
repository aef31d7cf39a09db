"""Compiles what launches ask for, with no device: `python -m tests.kernels.triton_compiler cuda:80 [--once]`.

The launches are those of the host functions themselves, recorded in place of being run, so that signatures, sizes and
options are the very ones of a device. Prints a line of JSON for each, or with `--once` for one launch of each kernel, and
exits with 1 where one spills registers; where nothing tells, it says so, and `spills` is null. Another Triton than the
installed one compiles where it comes first on PYTHONPATH.
"""

import json
import re
import sys
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gradwire import kernels
from gradwire.kernels import Block, Factors, Matrix, Rows
from gradwire.kernels.operands import FORMATS
from gradwire.kernels.triton_kernels import low_rank_dots
from tests.residuals import in_place

from .cuda_compiler import INSPECTOR, inspected

ROWS = Rows((Block(0, 299, 130, 0), Block(38_870, 1, 1000, 299)))
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNED = [["tt.divisibility", 16]]
SPILLED_BYTES = 16  # of a thread, at most: no kernel may live in local memory
# A few programs, or products of ranks of 32 and more whose rows are not aligned; and what older Tritons do, most on sm_120.
MORE_SPILLED_BYTES = {
    "3.4": {
        "_repair_all": 512,
        "_solve": 216,
        "_refine": 192,
        "left_dots": 144,
        "finish_dots": 136,
        "_select_rows": 136,
    },
    "3.6": {
        "_repair_all": 528,
        "_solve": 200,
        "_refine": 192,
        "left_dots": 136,
        "finish_dots": 128,
        "_select_rows": 40,
        "_quantize": 24,
    },
    "3.9": {"_dequantize": 32, "_repair_all": 192, "_solve": 128, "_refine": 192, "left_dots": 128, "finish_dots": 128},
}  # by the first version that they hold for
NOT_LOOKED_AT = f"spills were not looked at: there is no {INSPECTOR}, which comes with Triton's wheel"
recorded = {}


def record(self, *args, grid, warmup, **kwargs):
    """In place of `JITFunction.run`: what would be compiled."""
    values = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(self.params):
        value = values.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = POINTERS[value.dtype] if tensor else parameter.annotation_type
        number = value.data_ptr() if tensor else value
        if (tensor or not parameter.do_not_specialize) and number % 16 == 0:
            attributes[(index,)] = ALIGNED
    key = (self.__name__, *signature.values(), *constants.values(), *attributes, *values.items())
    recorded[key] = (self, signature, constants, attributes, values)


def launch_streams():
    """Casts, checks and sign bits: small blocks, usual ones, those that are no power of two, and those of two passes."""
    wide, size = torch.ones(40_000), 40_000
    for narrow in (torch.ones(size, dtype=torch.bfloat16), torch.ones(size, dtype=torch.float16)):
        kernels.cast_scaled(wide, narrow, 0.5)
        kernels.cast_scaled(narrow, wide, 0.5)
        kernels.cast_scaled(wide, narrow, 1.0, torch.ones(size))
    kernels.all_finite(wide)
    for values in (wide, narrow, torch.ones(size, dtype=torch.int8)):
        kernels.mark_rows(values, torch.ones(300, dtype=torch.bool), ROWS)
        kernels.clear_rows(values, torch.ones(300, dtype=torch.bool), ROWS)
    for block, grad, residual in ((8, wide, wide), (1024, wide, wide), (1000, narrow, None), (20_000, wide, wide)):
        rows = -(-size // block)
        scales, bits = torch.ones(rows, 1), torch.zeros(rows, block // 8, dtype=torch.uint8)
        kernels.sign_pack(grad, in_place(None if residual is None else residual.clone()), scales, bits, block)
        if block < 8192:
            kernels.sign_unpack_mean(scales[None], bits[None], grad)
            kernels.sign_unpack_mean(scales[None], bits[None], narrow, torch.ones(size))
    for bits in FORMATS:
        scales, codes = torch.ones(1, 40), torch.zeros(1, 5120 * bits, dtype=torch.int8)
        kernels.quantize_blocks(wide, None, scales, codes, 40_960, bits)
        kernels.quantize_blocks(narrow, in_place(torch.ones(size)), scales, codes, 40_960, bits, seed=1)
        kernels.dequantize_mean(scales[None], codes[None], narrow, bits, torch.ones(size))
        kernels.dequantize_mean(scales[None], codes[None], wide, bits)
    for block in (8, 128, 4096):
        kernels.rotate_blocks(wide, torch.ones(block))
        kernels.rotate_blocks(wide, torch.ones(block), back=True)
    for block in (128, 1024):
        launch_rotated(wide, narrow, block)
        launch_placed(wide, narrow, block)


def launch_placed(wide, narrow, block):
    """Codes of blocks in their places, of which some are short; as they lie and as they do not."""
    for first, grad in ((0, wide[: 10 * block]), (3, narrow[: 10 * block])):
        table = torch.tensor([[first, block], [first + block, block - 5]])
        places = kernels.Places(table, 10, 2 * block, aligned=not first)
        scales, bits = torch.ones(10, 1), torch.zeros(10, block // 8, dtype=torch.uint8)
        codes = torch.zeros(10, block // 4, dtype=torch.int8)
        for signs in (None, torch.ones(block)):
            kernels.sign_pack(grad, in_place(torch.ones(len(grad))), scales, bits, block, signs, places)
            kernels.sign_unpack_mean(scales[None], bits[None], grad, None, signs, places)
            form = block, 2, signs
            kernels.quantize_blocks(grad, in_place(torch.ones(len(grad))), scales, codes, *form, places=places)
            kernels.dequantize_mean(scales[None], codes[None], grad, 2, None, signs, places)


def launch_rotated(wide, narrow, block):
    """Codes of rotated blocks."""
    rows, size, turn = -(-len(wide) // block), len(wide), torch.ones(block)
    scales, bits = torch.ones(rows, 1), torch.zeros(rows, block // 8, dtype=torch.uint8)
    codes = torch.zeros(rows, block // 4, dtype=torch.int8)
    for grad in (wide, narrow):
        kernels.sign_pack(grad, in_place(torch.ones(size)), scales, bits, block, turn)
        kernels.sign_unpack_mean(scales[None], bits[None], grad, None, turn)
        kernels.quantize_blocks(grad, in_place(torch.ones(size)), scales, codes, block, 2, turn)
        kernels.dequantize_mean(scales[None], codes[None], grad, 2, None, turn)


def launch_selection():
    """Short and long rows, alone and several, with and without a residual."""
    for dtype, index, length in (
        (torch.float32, torch.int32, 100),
        (torch.float16, torch.int64, 4096),
        (torch.bfloat16, torch.int64, 5000),
        (torch.float32, torch.int32, 10_000),
    ):
        rows = 10_000 // length
        grad, total = torch.ones(length * rows, dtype=dtype), torch.ones(length * rows)
        values, indices = torch.ones(rows, 10, dtype=dtype), torch.ones(rows, 10, dtype=index)
        kernels.select_largest(
            grad, in_place(total.clone() if dtype == torch.float32 else None), indices, values, length
        )
        kernels.scatter_mean(indices[None], values[None], total, length)
        kernels.scatter_mean(indices.expand(8, rows, 10), values.expand(8, rows, 10), total, length, ascending=True)


def launch_products():
    """Ranks on both sides of what a pass serves, with and without a residual, aligned or not, partial sums included."""
    for rank, start, dtype in (
        (1, 0, torch.float32),
        (8, 1, torch.bfloat16),
        (16, 0, torch.float16),
        (32, 0, torch.float32),
        (32, 1, torch.float32),
        (65, 0, torch.float32),
    ):
        columns = max(64, rank)
        second = start + 64 * 4096
        factors = Factors((Matrix(start, 64, 4096, min(rank, 64)), Matrix(second, 4096, columns, rank)))
        p, q = torch.ones(factors.left_offsets[-1]), torch.ones(factors.right_offsets[-1])
        grad = torch.ones(second + 4096 * columns, dtype=dtype)
        residual = None if rank == 8 else torch.ones(grad.shape)
        kernels.low_rank_left(grad, in_place(residual), factors, q, p)
        kernels.low_rank_finish(grad, residual, factors, p, q)
        kernels.low_rank_right(grad, factors, p, q)
        kernels.orthogonalize(p, factors)
        kernels.normalize(q, factors, q.clone())


def compiled(target, function, signature, constants, attributes, options):
    """What is told of a kernel for a target, ("cuda", 80, 32)."""
    began = time.perf_counter()
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget(*target), options=options)
    used = resources(kernel.asm)
    return {
        "kernel": function.__name__,
        "triton": triton.__version__,
        "target": f"{target[0]}:{target[1]}",
        "constants": [str(value) for value in constants.values()],
        "seconds": time.perf_counter() - began,
        "shared_bytes": kernel.metadata.shared,
        **used,
        "spills": spills(function.__name__, used["spilled_bytes"]),
    }


def spills(kernel, spilled_bytes):
    """Whether a kernel is above its bar; None where nothing tells."""
    return None if spilled_bytes is None else spilled_bytes > allowed(kernel)


def allowed(kernel, version=triton.__version__):
    """Bytes of a thread that a kernel may spill under a version of Triton, the oldest one's bars under what is older."""
    older = [each for each in MORE_SPILLED_BYTES if parsed(each) <= parsed(version)]
    return MORE_SPILLED_BYTES[max(older, key=parsed, default="3.4")].get(kernel, SPILLED_BYTES)


def parsed(version):
    return tuple(map(int, version.split(".")[:2]))


def resources(assembly):
    """Registers and bytes of local memory a thread; None where nothing tells."""
    if "amdgcn" in assembly:
        told, names = assembly["amdgcn"], (r"\.vgpr_count:\s*(\d+)", r"\.private_segment_fixed_size:\s*(\d+)")
    elif not INSPECTOR.exists():
        return {"registers": None, "spilled_bytes": None}
    else:
        told, names = inspected(assembly["cubin"]), (r"REG:(\d+)", r"STACK:(\d+)")
    registers, spilled = (int(re.search(name, told)[1]) for name in names)
    return {"registers": registers, "spilled_bytes": spilled}


def target_of(name):
    kind, architecture = name.split(":")
    return (kind, int(architecture), 32) if kind == "cuda" else (kind, architecture, 64)


if __name__ == "__main__":
    JITFunction.run = record
    if sys.argv[1].startswith("hip"):
        low_rank_dots.PRECISION = "ieee"
    for operation in kernels.operations().values():
        operation.chosen = lambda device: "triton"
    launch_streams()
    launch_selection()
    launch_products()
    launches = {launch[0].__name__: launch for launch in recorded.values()} if "--once" in sys.argv else recorded
    rows = []
    for launch in launches.values():
        rows.append(compiled(target_of(sys.argv[1]), *launch))
        print(json.dumps(rows[-1]), flush=True)
    if any(row["spills"] is None for row in rows):
        print(NOT_LOOKED_AT, file=sys.stderr)
    sys.exit(any(row["spills"] for row in rows))
