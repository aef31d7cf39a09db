"""The CUDA sources, compiled by NVRTC through CuPy, and their kernels on torch's current stream."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..operands import Residual

NAME = "cuda"
SOURCES = Path(__file__).parent
THREADS = {"selection": 512, "bases": 256}  # of a thread block, by source
OPTIONS = ("-std=c++17", f"-I{SOURCES}")
FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def probe() -> str:
    """Why the kernels cannot run here; empty if they can. Compiles all sources, so that nothing fails in training."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "these kernels are for NVIDIA's devices"
    try:
        cupy = _cupy()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {_way_to_install()}"
    source = next(iter(THREADS))
    try:
        with cupy.cuda.Device(torch.cuda.current_device()):
            for source in THREADS:
                _module(source, torch.cuda.current_device())
    except (RuntimeError, ImportError, OSError, cupy.cuda.compiler.CompileException) as error:
        reason = f"CuPy does not compile or load {source}.cu: {type(error).__name__}: {error}"
        return f"{reason}; for torch's CUDA {torch.version.cuda}: {_way_to_install()}"
    return ""


def _way_to_install() -> str:
    """Return the command that installs the CuPy for torch's CUDA."""
    extra = "gpu-cuda12" if str(torch.version.cuda).startswith("12.") else "gpu"
    return f"pip install 'gradwire[{extra}]'"


def packed(**fields: int) -> NDArray[Any]:
    """The argument that all kernels of a source take: a structure of 64-bit numbers and addresses, in this order."""
    return numpy.array([tuple(fields.values())], dtype=_structure(tuple(fields)))


@functools.cache
def _structure(names: tuple[str, ...]) -> numpy.dtype[Any]:
    return numpy.dtype([(name, numpy.int64) for name in names])


def addresses(residual: Residual | None) -> dict[str, int]:
    """The fields of a residual: zeros where there is none."""
    before, after = (0, 0) if residual is None else map(Tensor.data_ptr, residual)
    return {"before": before, "after": after}


def launch(source: str, device: torch.device, arguments: NDArray[Any], kernels: Sequence[tuple[str, int]]) -> None:
    """Queue kernels of a source, (name, thread blocks), one behind the other on torch's current stream; waits for nothing.

    A source is compiled and loaded when it is first used on a device, which a CUDA graph cannot capture.
    """
    plain = arguments.view(f"V{arguments.nbytes}")  # CuPy would go through the names of the fields at each launch
    with _on_current_stream(device):
        for name, blocks in kernels:
            if blocks:
                _kernel(source, name, device.index)((blocks,), (THREADS[source],), (plain,))


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class _Stream:
    """A stream of torch as CuPy's `Stream.from_external` takes it; torch's own says so only since 2.9 or so."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@contextmanager
def _on_current_stream(device: torch.device) -> Iterator[None]:
    """Make torch's device and stream CuPy's."""
    index = device.index
    address = torch.cuda.current_stream(index).cuda_stream
    if torch.cuda.current_device() == index:
        with _external(address, index):
            yield
    else:
        with torch.cuda.device(device), _cupy().cuda.Device(index), _external(address, index):
            yield


@functools.lru_cache(maxsize=64)
def _external(address: int, device: int) -> Any:
    """CuPy's stream for one of torch's: no more than its address and its device."""
    streams = _cupy().cuda.Stream
    if hasattr(streams, "from_external"):
        return streams.from_external(_Stream(address))
    return _cupy().cuda.ExternalStream(address, device)


@functools.cache
def _cupy() -> Any:
    return import_module("cupy")


@functools.cache
def _kernel(source: str, name: str, device: int) -> Any:
    return _module(source, device).get_function(name)


@functools.cache
def _module(source: str, device: int) -> Any:
    """A source's module on the current device, which is number `device`."""
    module = _cupy().RawModule(path=str(_compiled(source)))
    module.compile()  # which loads it
    return module


def _compiled(source: str) -> Path:
    """A source's machine code for the current device, from the cache if it is there.

    CuPy's own way from a source to a module flushes denormal numbers to zero, so only its compiler and its loader are used.
    """
    cupy = _cupy()
    code = (SOURCES / f"{source}.cu").read_text()
    headers = [header.read_text() for header in sorted(SOURCES.glob("*.cuh"))]
    architecture = cupy.cuda.Device().compute_capability
    identity = repr((code, headers, OPTIONS[0], architecture, cupy.__version__))
    file = _cache() / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    if not file.exists():
        machine_code, _ = cupy.cuda.compiler.compile_using_nvrtc(code, options=OPTIONS, filename=f"{source}.cu")
        _write(file, machine_code)
    return file


@functools.cache
def _cache() -> Path:
    """The user's cache folder, or one of this process where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gradwire"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return folder if writable else Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process."""
    return tempfile.TemporaryDirectory(prefix="gradwire-")


def _write(file: Path, content: bytes) -> None:
    """All of it or nothing: other ranks may be doing the same."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        part.write(content)
    os.replace(part.name, file)
