"""The classes of the shared memory's extension: their arguments, what they keep, and who waits without the GIL."""

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch

from gradwire.ddp_core import obstacle

from .test_shared_buffer import HEADER, extension, memory_of, ranks_of_one_process

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
SUMS = ["SharedSums", "SharedShares"]


@pytest.fixture
def file():
    """The number of a file without a name."""
    number = extension().memory_file("test")
    yield number
    os.close(number)


def mapped():
    """How often this process has files without a name in its memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:test")


def sums_of(kind, memories):
    return getattr(extension(), kind)(memories, 0, [(HEADER, 10, 4)])


def test_what_the_system_refuses_is_an_os_error_with_its_number():
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        extension().Memory(-1, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(ProcessLookupError):
        extension().process_file(1 << 22)


def test_a_memory_larger_than_its_file_is_an_error_and_no_signal(file):
    os.ftruncate(file, 4096)
    for size in (0, 4097, 2**63):
        with pytest.raises(ValueError, match=f"from 1 to all of its file's 4096 bytes, got {size}$"):
            extension().Memory(file, size)
    assert numpy.asarray(extension().Memory(file, 4096))[-1] == 0
    os.ftruncate(file, 0)
    with pytest.raises(ValueError, match="1 to all of its file's 0 bytes, got 1"):
        extension().Memory(file, 1)


def test_numbers_of_files_and_processes_are_not_cut_to_32_bits(file):
    for wide in (2**32 + file, file - 2**32, 2**64 + file):
        with pytest.raises(TypeError, match=rf"argument 1 of Memory\(\) has to be an integer of 32 bits, got {wide}"):
            extension().Memory(wide, 4096)
    with pytest.raises(TypeError, match=r"argument 1 of process_file\(\) has to be an integer of 32 bits"):
        extension().process_file(2**32 + os.getpid())


@pytest.mark.parametrize("kind", SUMS)
def test_ranks_and_buckets_that_are_not_there_are_errors_that_say_which_are(kind):
    make, memory, end = getattr(extension(), kind), memory_of(HEADER + 40), HEADER + 40
    with pytest.raises(IndexError, match="no rank 5: there are 1, from 0 on"):
        make([memory], 5, [])
    with pytest.raises(IndexError, match="no rank 0: there are 0"):
        make([], 0, [])
    least = make.header_bytes(200, 2)
    with pytest.raises(ValueError, match=f"a memory needs {least} bytes, got 8192"):
        make([memory_of(1 << 20), memory_of(8192)], 0, [(0, 0, 1)] * 200)
    wrong = [(HEADER, 11, 4), (HEADER, 6, 8), (end, 1, 4), (1 << 62, 1, 4), (HEADER, 2**62, 4), (2**64 - 4, 2, 4)]
    wrong += [(0, 10, 4), (HEADER + 2, 1, 4), (HEADER, 1, 0), (HEADER, 1, 1)]
    for bucket in wrong:
        with pytest.raises(ValueError, match=f"buckets have to lie from byte {make.header_bytes(2, 1)} to {end}"):
            make([memory], 0, [(HEADER, 10, 4), bucket])
    for bucket in ((HEADER, 10, 4), (HEADER, 5, 8), (end - 4, 1, 4), (0, 0, 1)):
        make([memory], 0, [(HEADER, 10, 4), bucket])


@pytest.mark.parametrize("kind", SUMS)
def test_methods_refuse_places_that_are_not_there(kind):
    sums, places = sums_of(kind, [memory_of(HEADER + 40)]), SUMS.index(kind) + 1
    calls = [sums.arrive, sums.since, sums.missing, lambda place: sums.wait(place, 0.0)]
    for call in calls + ([sums.is_there] if kind == "SharedSums" else []):
        for place in (places, 10**6, 2**63):
            with pytest.raises(IndexError, match=f"no place {place}: there are {places}, from 0 on"):
                call(place)
        call(places - 1)


def test_shares_of_buckets_that_are_not_there_or_too_short_are_errors():
    shares = sums_of("SharedShares", [memory_of(HEADER + 40)])
    for call in (lambda *share: shares.sum(*share, 1.0), shares.share):
        for bucket in (1, 2**63):
            with pytest.raises(IndexError, match=f"no bucket {bucket}: there are 1"):
                call(bucket, 0, 1)
        for first, count in ((0, 11), (11, 0), (9, 2), (2**64 - 1, 1), (1, 2**64 - 1)):
            with pytest.raises(IndexError, match="ends with its bucket"):
                call(0, first, count)
        call(0, 0, 10)
        call(0, 10, 0)


def test_memory_lives_as_long_as_an_array_of_it_or_sums_in_it():
    before = mapped()
    memory = memory_of(HEADER + 40)
    tensor = torch.frombuffer(numpy.asarray(memory), dtype=torch.float32, count=10, offset=HEADER)
    sums = sums_of("SharedSums", [memory])
    del memory
    assert mapped() == before + 1
    tensor.fill_(2.0)
    del tensor
    assert mapped() == before + 1
    sums.arrive(0)
    assert sums.wait(0, 60.0)
    del sums
    assert mapped() == before


@pytest.mark.parametrize("kind", SUMS)
def test_objects_that_come_and_go_leave_no_reference(kind):
    memories, before = [memory_of(HEADER + 40)], mapped()
    things = [memories[0], memories, getattr(extension(), kind), extension().Memory]
    counts = [sys.getrefcount(each) for each in things]
    for _ in range(50):
        sums_of(kind, memories).missing(0)
        memory_of(mmap.PAGESIZE)
    assert [sys.getrefcount(each) for each in things] == counts
    assert mapped() == before


def test_other_threads_run_while_one_waits():
    first, second = ranks_of_one_process(2, [10])
    first.sums.arrive(0)
    waiting, found = threading.Event(), []
    waiter = threading.Thread(target=lambda: (waiting.set(), found.append(first.sums.wait(0, 60.0))))
    waiter.start()
    waiting.wait(60)
    second.sums.arrive(0)
    waiter.join(60)
    assert found == [True]


ENDING = """
import importlib.util, mmap, os, sys, threading, time
spec = importlib.util.spec_from_file_location("_shared_memory", sys.argv[1])
spec.loader.exec_module(extension := importlib.util.module_from_spec(spec))
header, memories = 4 * mmap.PAGESIZE, []
for _ in range(2):
    file = extension.memory_file("test")
    os.ftruncate(file, header + 40)
    memories.append(extension.Memory(file, header + 40))
sums = extension.SharedSums(memories, 0, [(header, 10, 4)])
sums.arrive(0)

def wait():
    while True:
        sums.wait(0, 0.001)

class Late:
    def __del__(self):
        for _ in range(20):
            time.sleep(0.001)

threading.Thread(target=wait, daemon=True).start()
sys.modules["late"] = Late()
"""


def test_an_interpreter_ends_well_while_a_thread_waits():
    command = [sys.executable, "-c", ENDING, extension().__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
