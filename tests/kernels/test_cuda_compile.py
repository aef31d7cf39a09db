"""The CUDA sources compile for the GPUs that matter, and the launcher asks for what is in them; no GPU is needed."""

import json
import re

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import cuda
from gradwire.kernels.cuda import module, operations

from ..gpu.cases import GRADS, factors_of
from . import cuda_compiler
from .cuda_emulator import argument_of

MARKS = dict.fromkeys(("sm_75", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"), pytest.mark.thorough)  # sm_80: none


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((source, architecture), marks=MARKS.get(architecture, ()))
        for source in module.THREADS
        for architecture in cuda_compiler.PROCESSORS
    ],
    ids="-".join,
)
def compiled(request):
    """A source's name, and what it compiles to."""
    source, architecture = request.param
    nvrtc = cuda_compiler.library()
    if nvrtc is None:
        pytest.skip("there is no NVRTC: neither among torch's wheels nor on the system")
    return source, cuda_compiler.Program(nvrtc, source, architecture)


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
        operations.select(
            torch.zeros(8, dtype=number), None, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), 8
        )
    for rank in operations.RANKS:
        operations.orthonormal(torch.zeros(32 * rank), factors_of([(32, rank)]))
    (fields,) = names
    return asked, fields


def test_it_compiles_without_a_warning_and_keeps_its_arrays_in_registers(compiled):
    _, program = compiled
    assert program.log == ""
    assert program.machine_code.startswith(b"\x7fELF")
    assert "__local_depot" not in program.ptx


def test_every_kernel_keeps_to_registers_and_leaves_room_for_others(compiled):
    _, program = compiled
    if not cuda_compiler.INSPECTOR.exists():
        pytest.skip("cuobjdump comes with Triton's wheel")
    rows = program.resources()
    print(*map(json.dumps, rows), sep="\n")
    assert {row["kernel"] for row in rows} == set(re.findall(r"\.entry (\w+)\(", program.ptx))
    assert [row for row in rows if row["spills"] or row["crowds"]] == []


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


def test_without_a_gpu_the_backend_says_why_it_is_not_there():
    backend = next(each for each in kernels.backends() if each.name == cuda.NAME)
    assert backend.device == "cuda"
    if not torch.cuda.is_available():
        assert backend.reason == "torch sees no CUDA device"
