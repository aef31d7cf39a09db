"""How the CUDA sources are compiled, kept and launched, with a stand-in for CuPy that notes what it is asked for."""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from gradwire.kernels.cuda import module

SECOND = SimpleNamespace(index=1)


class CompileError(Exception):
    """What CuPy raises for a source that does not compile."""


@dataclass
class Entered:
    """What can be entered, again and again."""

    log: list
    what: str

    def __enter__(self):
        self.log.append(self.what)

    def __exit__(self, *_):
        self.log.append(f"end of {self.what}")


class StandIn:
    """As much of CuPy as the launcher uses, all in one object. `log`: what was done, in order."""

    __version__ = "14.0"
    CompileException = CompileError
    compute_capability = "90"

    def __init__(self):
        self.log = []
        self.error = None
        self.cuda = self.compiler = self.Stream = self

    def Device(self, index=None):
        return self if index is None else Entered(self.log, f"device {index}")

    def from_external(self, stream):
        return Entered(self.log, f"stream {stream.__cuda_stream__()[1]}")

    def compile_using_nvrtc(self, code, options, filename):
        if self.error:
            raise self.error
        self.log.append(f"compile {filename}")
        return f"machine code of {filename}".encode(), None

    def RawModule(self, path):
        self.log.append(f"load {Path(path).read_text()}")
        return self

    def compile(self):
        """Of a module: load it."""

    def get_function(self, name):
        return lambda grid, block, arguments: self.log.append(
            (name, grid, block, [numpy.frombuffer(each.tobytes(), numpy.int64).tolist() for each in arguments])
        )


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    stand_in = StandIn()
    caches = (module._module, module._kernel, module._cache, module._temporary, module._external)
    monkeypatch.setattr(module, "_cupy", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=77 + index))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cache in caches:
        cache.cache_clear()
    yield stand_in
    for cache in caches:
        cache.cache_clear()


def test_kernels_are_queued_in_order_on_the_current_stream_of_the_device(cupy):
    module.launch("selection", SECOND, module.packed(grad=5, k=-1), [("first", 3), ("nothing", 0), ("second", 1)])
    assert cupy.log == [
        "device 1",
        "stream 78",
        "compile selection.cu",
        "load machine code of selection.cu",
        ("first", (3,), (512,), [[5, -1]]),
        ("second", (1,), (512,), [[5, -1]]),
        "end of stream 78",
        "end of device 1",
    ]


def test_a_source_is_compiled_once_and_found_by_the_next_process(cupy, tmp_path):
    for _ in range(2):
        module.launch("bases", SECOND, module.packed(grad=5), [("kernel", 1)])
    assert cupy.log.count("compile bases.cu") == 1
    module._module.cache_clear()  # as a new process begins
    module._kernel.cache_clear()
    module.launch("bases", SECOND, module.packed(grad=5), [("kernel", 1)])
    assert cupy.log.count("compile bases.cu") == 1
    assert cupy.log.count("load machine code of bases.cu") == 2
    assert [file.suffix for file in (tmp_path / "gradwire").iterdir()] == [".cubin"]


@pytest.mark.parametrize("what", ["compute_capability", "__version__"])
def test_another_gpu_or_compiler_gets_machine_code_of_its_own(cupy, monkeypatch, what):
    first = module._compiled("bases")
    monkeypatch.setattr(StandIn, what, "80")
    assert module._compiled("bases") != first


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_the_process(cupy, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert module._compiled("bases").exists()
    assert module._cache() == Path(module._temporary().name)


def test_the_backend_is_there_when_all_sources_compile_and_load(cupy):
    assert module.probe() == ""
    for source in module.THREADS:
        assert f"load machine code of {source}.cu" in cupy.log


@pytest.mark.parametrize("error", [RuntimeError("no NVRTC"), CompileError("no NVRTC")], ids=["runtime", "compiler"])
def test_what_keeps_it_from_compiling_is_the_reason_why_it_is_not_there(cupy, error):
    cupy.error = error
    assert module.probe().startswith(f"CuPy does not compile or load selection.cu: {type(error).__name__}: no NVRTC; ")


@pytest.mark.parametrize(("version", "extra"), [("12.8", "gpu-cuda12"), ("13.0", "gpu"), (None, "gpu")])
def test_without_cupy_the_reason_says_what_to_install_for_the_cuda_of_torch(cupy, monkeypatch, version, extra):
    def missing():
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(module, "_cupy", missing)
    assert module.probe().endswith(f"; pip install 'gradwire[{extra}]'")


def test_cupy_takes_what_it_is_given():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    compiler = inspect.signature(cupy.cuda.compiler.compile_using_nvrtc)
    compiler.bind("code", options=module.OPTIONS, filename="bases.cu")
    assert issubclass(cupy.cuda.compiler.CompileException, Exception)
    if hasattr(cupy.cuda.Stream, "from_external"):
        assert cupy.cuda.Stream.from_external(module._Stream(1234)).ptr == 1234
