"""The team of threads behind the native kernels: many callers, forks, exits, and other settings of torch."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import kernels

from ..gpu.cases import numbers
from .native_given import native_of, needs_native

pytestmark = needs_native
SIZE = 500_000
CODE = f"""
import os, signal, threading, time, torch
from gradwire import kernels
kernels.use_backend("native").__enter__()
source, out = torch.arange({SIZE} * 1.0), torch.empty({SIZE})

def right(threads):
    torch.set_num_threads(threads)
    out.fill_(torch.nan)
    kernels.cast_scaled(source, out, 0.5)
    return bool((out == source * 0.5).all())

def tasks():
    return len(os.listdir("/proc/self/task"))

before = tasks()
for threads in (1, 3, 2, 1, 3):
    torch.set_num_threads(threads)
    kernels.cast_scaled(source, out, 0.5)
print("more threads", tasks() - before)

assert right(3)
child = os.fork()
if child == 0:
    kernels.cast_scaled(source, out, 0.25)
    os._exit(0 if (out.numpy() == source.numpy() * 0.25).all() and tasks() == 3 else 1)
print("forked", os.waitpid(child, 0)[1], right(3))

with kernels.use_backend("reference"):  # the first calls of torch's methods must not be under way in a fork
    kernels.cast_scaled(source, out, source.data_ptr() and source.stride()[0] * 0.5)
stop = threading.Event()

def compute():
    mine = torch.empty_like(source)
    while not stop.is_set():
        kernels.cast_scaled(source, mine, 0.5)

torch.set_num_threads(3)
callers = [threading.Thread(target=compute) for _ in range(3)]
for caller in callers:
    caller.start()
ends = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        kernels.cast_scaled(source, out, 0.5)
        os._exit(0 if out.numpy()[-1] == source.numpy()[-1] * 0.5 else 1)
    ends.append(os.waitpid(child, 0)[1])
stop.set()
for caller in callers:
    caller.join()
print("forked while others compute", *ends)

assert right(4)
interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
try:
    interrupt.start()
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", right(4))
"""


@pytest.fixture(scope="module")
def printed():
    """What a fresh interpreter prints, with the same gradwire as this one's; it ends well while its threads wait."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    forks = "ignore:This process:DeprecationWarning"  # of Python since 3.12, where a process with threads forks
    folder = Path(gradwire.__file__).parents[1]
    command = [sys.executable, "-W", forks, "-c", CODE]
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def test_callers_on_many_threads_all_get_their_own_results():
    factors = kernels.Factors(tuple(kernels.Matrix(i * 50_000, 200, 250, 3) for i in range(10)))
    expected = torch.empty(factors.left_offsets[-1])
    matrices, q = numbers(SIZE), numbers(factors.right_offsets[-1])
    native_of(kernels.low_rank_left)(matrices, None, factors, q, expected)
    wrong = []

    def call(number):
        torch.set_num_threads(1 + number % 4)
        for scale in range(20):
            p, out = torch.empty_like(expected), torch.empty(SIZE)
            native_of(kernels.cast_scaled)(matrices, out, scale + number)
            native_of(kernels.low_rank_left)(matrices, None, factors, q, p)
            if not (torch.equal(out, matrices * (scale + number)) and torch.equal(p, expected)):
                wrong.append((number, scale))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    torch.set_num_threads(1)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_the_number_of_threads_may_change_and_is_never_exceeded(printed):
    assert "more threads 2" in printed


def test_a_forked_child_has_threads_of_its_own(printed):
    assert "forked 0 True" in printed


def test_a_fork_while_other_threads_compute_does_not_hang(printed):
    assert f"forked while others compute{' 0' * 20}" in printed


def test_an_interrupt_reaches_the_main_thread(printed):
    assert "interrupted True" in printed


@pytest.mark.parametrize("flushed", [False, True])
def test_all_threads_treat_small_numbers_as_the_caller_does(flushed):
    source, results = torch.full((SIZE,), 1e-40), []
    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor does not flush")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(torch.empty(SIZE))
        native_of(kernels.cast_scaled)(source, results[-1], 0.5)
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    assert (results[0] == 0).all() == flushed
    assert torch.equal(*results)
