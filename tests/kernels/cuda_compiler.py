"""Compiles the CUDA sources by NVRTC, with no device: `python -m tests.kernels.cuda_compiler sm_90 [libnvrtc.so.12]`.

Prints a line of JSON for each kernel, and exits with 1 where one spills registers, or takes so many of them, or so much
shared memory, that a multiprocessor holds too few threads to hide what memory takes.
"""

import ctypes
import ctypes.util
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gradwire.kernels.cuda import module

SPILLED_BYTES = 32  # of a thread, at most
MORE_SPILLED_BYTES = {"basis_finish_32": 160}  # where it repairs what is ill-conditioned
RESIDENT_THREADS = 512  # of a multiprocessor, at least
FEWER_RESIDENT_THREADS = {"basis_finish_32": 256, "basis_solve_32": 256}  # with CUDA 12, which spills less for it
REGISTERS = 65_536  # of a multiprocessor, all architectures; a warp takes them 8 a thread at a time
# What a multiprocessor has: threads, and KiB of shared memory (CUDA C++ Programming Guide, technical specifications).
PROCESSORS = {"sm_80": (2048, 164), "sm_90": (2048, 228), "sm_100": (2048, 228), "sm_120": (1536, 100)}
PROCESSORS |= {"sm_75": (1024, 64), "sm_86": (1536, 100), "sm_89": (1536, 100)}
TRITON = importlib.util.find_spec("triton")
INSPECTOR = Path(TRITON.origin if TRITON else "").parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def library():
    """NVRTC, from torch's wheels or from the system; None where there is none."""
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    names = [*sorted(map(str, wheels.glob("**/libnvrtc.so*"))), ctypes.util.find_library("nvrtc")]
    return next((ctypes.CDLL(name) for name in names if name), None)


class Program:
    """A source compiled for an architecture: the compiler's log, PTX and machine code."""

    def __init__(self, nvrtc, source, architecture):
        self.source, self.architecture = source, architecture
        self._nvrtc, self._handle = nvrtc, ctypes.c_void_p()
        code = (module.SOURCES / f"{source}.cu").read_bytes()
        self._call(
            "CreateProgram", ctypes.byref(self._handle), code, f"{source}.cu".encode(), 0, None, None, of_this=False
        )
        options = [option.encode() for option in (*module.OPTIONS, f"-arch={architecture}")]
        status = nvrtc.nvrtcCompileProgram(self._handle, len(options), (ctypes.c_char_p * len(options))(*options))
        self.log = self._text("ProgramLog")
        assert status == 0, self.log
        self.ptx, self.machine_code = self._text("PTX"), self._bytes("CUBIN")

    def _call(self, name, *arguments, of_this=True):
        status = getattr(self._nvrtc, f"nvrtc{name}")(*([self._handle] if of_this else []), *arguments)
        assert status == 0, f"nvrtc{name} answers {status}"

    def _bytes(self, what):
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", content)
        return content.raw

    def _text(self, what):
        return self._bytes(what).rstrip(b"\0").decode()

    def resources(self):
        """What a thread or a thread block of each kernel takes, and whether that is too much."""
        told = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", inspected(self.machine_code))
        rows = []
        for kernel, *numbers in told:
            registers, spilled, shared = map(int, numbers)
            threads = resident_threads(self.architecture, module.THREADS[self.source], registers, shared)
            rows.append(
                {
                    "kernel": kernel,
                    "target": self.architecture,
                    "shared_bytes": shared,
                    "registers": registers,
                    "spilled_bytes": spilled,
                    "resident_threads": threads,
                    "spills": spilled > MORE_SPILLED_BYTES.get(kernel, SPILLED_BYTES),
                    "crowds": threads < FEWER_RESIDENT_THREADS.get(kernel, RESIDENT_THREADS),
                }
            )
        return rows


def resident_threads(architecture, threads, registers, shared_bytes):
    """How many threads of a kernel a multiprocessor holds at once, in thread blocks of `threads`."""
    most, kibibytes = PROCESSORS[architecture]
    blocks = [most // threads, REGISTERS // (-(-registers // 8) * 8 * threads)]
    if shared_bytes:
        blocks.append(kibibytes * 1024 // shared_bytes)
    return threads * min(blocks)


def inspected(machine_code):
    """What NVIDIA's tool in Triton's wheel says of kernels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [INSPECTOR, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(architecture, nvrtc):
    """The lines, and whether a kernel takes too much."""
    if nvrtc is None or not INSPECTOR.exists():
        sys.exit("NVRTC comes with torch's wheels for CUDA, cuobjdump with Triton's: one of them is missing")
    rows = [row for source in module.THREADS for row in Program(nvrtc, source, architecture).resources()]
    print(*map(json.dumps, rows), sep="\n")
    return any(row["spills"] or row["crowds"] for row in rows)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in PROCESSORS:
        sys.exit(f"python -m tests.kernels.cuda_compiler ARCHITECTURE [NVRTC], one of {', '.join(PROCESSORS)}")
    sys.exit(main(sys.argv[1], ctypes.CDLL(sys.argv[2]) if sys.argv[2:] else library()))
