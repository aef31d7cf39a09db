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


def mapped():
    """How often this process has files without a name in its memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:test")


def sums_of(kind, memories):
    return getattr(extension(), kind)(memories, 0, [(HEADER, 10, 4)])


@pytest.mark.parametrize("kind", SUMS)
def test_wrong_arguments_are_errors_that_name_the_class_or_method(kind):
    make, memories = getattr(extension(), kind), [memory_of(HEADER + 40)]
    for arguments, words in (
        ((), rf"^{kind}\(\) takes 3 arguments, 0 were given"),
        ((memories, -1, []), rf"argument 2 of {kind}\(\) has to be an integer from 0 on, got -1"),
        (([None], 0, []), rf"argument 1 of {kind}\(\) has to be Memory, got \[None\]"),
        ((memories, 0, [(HEADER, 10)]), rf"argument 3 of {kind}\(\) has to be three numbers for each bucket"),
    ):
        with pytest.raises(TypeError, match=words):
            make(*arguments)
    with pytest.raises(TypeError, match="no keyword arguments"):
        make(memories, 0, buckets=[])
    with pytest.raises(TypeError, match=r"wait\(\) takes 2 arguments, 1 were given"):
        sums_of(kind, memories).wait(0)
    with pytest.raises(TypeError, match=r"argument 2 of wait\(\) has to be a number, got None"):
        sums_of(kind, memories).wait(0, None)
    with pytest.raises(TypeError, match=f"'arrive' .*{kind}"):
        make.arrive(memories[0], 0)


def test_what_the_system_refuses_is_an_os_error_with_its_number():
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        extension().Memory(-1, 4096)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(ProcessLookupError):
        extension().process_file(1 << 22)


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
    assert sums.wait(0, 5.0)
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
    waiting.wait(20)
    second.sums.arrive(0)
    waiter.join(20)
    assert found == [True]


ENDING = """
import sys, threading, time
from tests.ddp_core.transport.test_shared_buffer import ranks_of_one_process
first, second = ranks_of_one_process(2, [10])
first.sums.arrive(0)

def wait():
    while True:
        first.sums.wait(0, 0.001)

class Late:
    def __del__(self):
        for _ in range(20):
            time.sleep(0.001)

threading.Thread(target=wait, daemon=True).start()
sys.modules["late"] = Late()
"""


def test_an_interpreter_ends_well_while_a_thread_waits():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
