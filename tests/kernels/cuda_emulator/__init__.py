"""CUDA sources compiled by g++ for the CPU, and run by `emulator.hpp`: their logic is tested where there is no GPU."""

import ctypes
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.kernels.cuda.module import SOURCES, THREADS

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-sign-compare")
FLAGS = ("-std=c++17", "-O2", *WARNINGS)
# Signed overflow, shifts, misaligned and out-of-bounds accesses of arrays of known size end the process.
SANITIZED = ("-fsanitize=undefined", "-fno-sanitize-recover", "-fno-sanitize=vptr")
PROGRAM = """
#include "emulator.hpp"

namespace {{
#include "common.cuh"
#include "float16.hpp"
#include "{source}.cu"

template <typename Work, void (*KERNEL)(Work)>
void call(const void* arguments) {{
    KERNEL(*static_cast<const Work*>(arguments));
}}
}}

extern "C" void run(int kernel, const void* arguments, unsigned blocks, unsigned threads, int reversed) {{
    void (*const kernels[])(const void*) = {{ {calls} }};
    emulator::run_grid(kernels[kernel], arguments, blocks, threads, reversed != 0);
}}

extern "C" unsigned long long argument_size() {{ return sizeof({work}); }}
"""


def code_of(source):
    """The text of a source, with that of its headers."""
    return _with_headers(f"{source}.cu")


def _with_headers(name):
    """Each of our headers is included at one place."""
    code = (SOURCES / name).read_text()
    return re.sub(r'^#include "(.+)"\n', lambda found: _with_headers(found.group(1)), code, flags=re.MULTILINE)


def kernels_of(source):
    """The names of a source's kernels."""
    code = code_of(source)
    names = re.findall(r'^extern "C" __global__ void \S+ (\w+)\(', code, re.MULTILINE)
    for name in re.findall(r"^FOR_EACH_FORMAT\((\w+),", code, re.MULTILINE):
        names += [f"{name}_{number}" for number in ("float32", "bfloat16", "float16")]
    for rank in re.findall(r"^FOR_RANK\((\d+)\)", code, re.MULTILINE):
        names += [f"basis_solve_{rank}", f"basis_finish_{rank}"]
    return names


def argument_of(source):
    """The name of the structure that a source's kernels take, and the names of its fields in order."""
    code = code_of(source)
    (name,) = set(re.findall(r"(?:^FOR_EACH_FORMAT\(\w+, |__grid_constant__ )(?!WORK)(\w+)", code, re.MULTILINE))
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", code, re.MULTILINE | re.DOTALL).group(1)
    return name, tuple(re.findall(r"(\w+);", re.sub(r"//.*", "", body)))


def build(folder):
    """{source: library}, compiled at once in `folder`."""
    running = {source: _compiler(source, folder) for source in THREADS}
    for source, (process, _) in running.items():
        if process.wait():
            raise RuntimeError(f"{source}.cu does not compile for the emulator")
    return {source: ctypes.CDLL(str(library)) for source, (_, library) in running.items()}


def _compiler(source, folder):
    program, library = folder / f"{source}.cpp", folder / f"{source}.so"
    work, _ = argument_of(source)
    calls = ", ".join(f"call<{work}, {name}>" for name in kernels_of(source))
    program.write_text(PROGRAM.format(source=source, calls=calls, work=work))
    command = [
        "g++",
        *FLAGS,
        *SANITIZED,
        "-shared",
        "-fPIC",
        f"-I{HERE}",
        f"-I{SOURCES}",
        str(program),
        "-o",
        str(library),
    ]
    return subprocess.Popen(command), library


@dataclass
class Emulator:
    """Stands in for `gradwire.kernels.cuda.module.launch`. `reversed`: the last block and the last thread go first."""

    libraries: dict
    reversed: bool = False
    launched: set = field(default_factory=set)

    def launch(self, source, device, arguments, kernels):
        """Run kernels on CPU tensors."""
        _, fields = argument_of(source)
        assert arguments.dtype.names == fields
        assert arguments.nbytes == self.libraries[source].argument_size()
        for name, blocks in kernels:
            number = kernels_of(source).index(name)
            self.launched.add(name)
            self.libraries[source].run(
                number, ctypes.c_void_p(arguments.ctypes.data), blocks, THREADS[source], int(self.reversed)
            )
