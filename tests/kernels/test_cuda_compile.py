"""The CUDA sources compile for the GPUs that matter, and the launcher asks for what is in them; no GPU is needed."""

import ctypes
import ctypes.util
import re
from pathlib import Path

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import cuda
from gradwire.kernels.cuda import bases, module, selection, signs

from ..gpu.cases import GRADS, factors_of
from ..residuals import in_place
from .cuda_emulator import argument_of, code_of

ARCHITECTURES = {"sm_80": [], "sm_90": [], "sm_100": [pytest.mark.slow], "sm_120": [pytest.mark.slow]}
SPILLED_BYTES = 32  # of a thread, at most
MORE_SPILLED_BYTES = {"basis_finish_32": 160}  # where it repairs what is ill-conditioned


def library():
    """NVRTC, from torch's wheels or from the system."""
    wheels = Path(torch.__file__).parents[1] / "nvidia"
    names = [*sorted(map(str, wheels.glob("**/libnvrtc.so*"))), ctypes.util.find_library("nvrtc")]
    for name in filter(None, names):
        return ctypes.CDLL(name)
    pytest.skip("there is no NVRTC: neither among torch's wheels nor on the system")


class Program:
    """A source compiled for an architecture: the compiler's log, PTX and machine code."""

    def __init__(self, nvrtc, source, architecture):
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


@pytest.fixture(
    scope="module",
    params=[pytest.param((s, a), marks=m, id=f"{s}-{a}") for s in module.THREADS for a, m in ARCHITECTURES.items()],
)
def compiled(request):
    """A source's name, and what it compiles to."""
    source, architecture = request.param
    return source, Program(library(), source, architecture)


def asked_for(source, monkeypatch):
    """{kernel: bytes of its argument} of all that the launcher asks for, and the names of the argument's fields."""
    asked, names = {}, set()

    def note(launched, device, arguments, stages):
        if launched == source:
            asked.update({kernel: arguments.nbytes for kernel, _ in stages})
            names.add(arguments.dtype.names)

    monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(module, "processors", lambda device: 2)
    for number in GRADS:
        for block in (8, 2048, 16384):
            bits, scales = torch.zeros(1, block // 8, dtype=torch.uint8), torch.zeros(1, 1)
            signs.encode_signs(torch.zeros(block, dtype=number), in_place(torch.zeros(block)), scales, bits, block)
        selection.select(torch.zeros(8, dtype=number), None, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), 8)
    for rank in bases.RANKS:
        bases.orthonormal(torch.zeros(32 * rank), factors_of([(32, rank)]))
    (fields,) = names
    return asked, fields


def test_it_compiles_without_a_warning_and_keeps_its_arrays_in_registers(compiled):
    _, program = compiled
    assert program.log == ""
    assert program.machine_code.startswith(b"\x7fELF")
    assert "__local_depot" not in program.ptx


def test_no_kernel_spills_registers(compiled):
    compiler = pytest.importorskip("tests.kernels.triton_compiler", reason="cuobjdump comes with Triton")
    if not compiler.INSPECTOR.exists():
        pytest.skip("cuobjdump comes with Triton's wheel")
    told = compiler.inspected(compiled[1].machine_code)
    stacks = {kernel: int(size) for kernel, size in re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", told)}
    assert stacks
    assert {k for k, size in stacks.items() if size > MORE_SPILLED_BYTES.get(k, SPILLED_BYTES)} == set()


def test_denormal_numbers_are_not_flushed(compiled):
    _, program = compiled
    assert ".ftz" not in program.ptx


def test_the_kernels_and_their_arguments_are_those_that_the_launcher_asks_for(compiled, monkeypatch):
    source, program = compiled
    sizes = dict(re.findall(r"\.entry (\w+)\(\s*\.param \.align 8 \.b8 \1_param_0\[(\d+)\]\s*\)", program.ptx))
    entries = re.findall(r"\.entry (\w+)\(", program.ptx)
    asked, fields = asked_for(source, monkeypatch)
    assert set(entries) == set(asked)
    assert {kernel: int(size) for kernel, size in sizes.items()} == asked
    assert argument_of(source)[1] == fields


def test_thread_blocks_have_the_size_that_they_are_compiled_for(compiled):
    source, program = compiled
    sizes = {int(size) for size in re.findall(r"\.maxntid (\d+)", program.ptx)}
    assert sizes == {module.THREADS[source]}


CONSTANTS = {
    "signs": {"PART": "ITEMS * WARP", "CHUNK": "WARPS * PART"},
    "selection": {"ROW_BINS": selection.BINS},
    "bases": {"LARGEST_RANK": bases.RANKS[-1], "TILE": bases.TILE},
}


@pytest.mark.parametrize("source", module.THREADS)
def test_constants_are_the_same_in_the_sources_and_in_the_launcher(source):
    written = dict(re.findall(r"^constexpr int (\w+) = ([^;]+);", code_of(source), re.MULTILINE))
    for name, value in CONSTANTS[source].items():
        assert written[name] == str(value)
    assert module.THREADS[source] == int(written["THREADS"])


def test_the_launcher_counts_as_the_sources_do():
    assert module.THREADS["signs"] == signs.WARPS * 32
    assert module.THREADS["signs"] * signs.PART // 32 == signs.CHUNK
    assert module.THREADS["selection"] == selection.WARPS * 32
    assert selection.LARGEST_SEGMENT <= 1 << 16  # places in a segment have 16 bits


def test_without_a_gpu_the_backend_says_why_it_is_not_there():
    backend = next(each for each in kernels.backends() if each.name == cuda.NAME)
    assert backend.device == "cuda"
    if not torch.cuda.is_available():
        assert backend.reason == "torch sees no CUDA device"


def test_it_comes_before_triton_which_has_the_same_operations():
    names = [each.name for each in kernels.backends()]
    assert names.index(cuda.NAME) < names.index("triton")
