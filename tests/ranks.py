"""One pool of rank processes for a whole test session; torch is imported once, in the process that they are forked from."""

import gc
import io
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

import gradwire  # noqa: F401  before the workers' memory is frozen

PATIENCE = "TESTS_PATIENCE"  # a variable: how many times as long ranks wait, on a busy machine
GROUP_TIMEOUT = timedelta(seconds=30 * float(os.environ.get(PATIENCE, 1)))
STARTED = 300  # seconds in which a worker is up, beside a run's time limit: on a busy machine torch takes two minutes
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo.backends.debugging", "pytest", "tests.ranks"]  # each takes long
START = "spawn" if torch.cuda.is_available() else "forkserver"  # CUDA may not be forked


@dataclass(frozen=True)
class RankFailure:
    """What a rank raised."""

    rank: int
    type_name: str
    message: str
    traceback: str
    seconds: float  # since the function began


@dataclass(frozen=True)
class LostRank:
    """A rank that gave no answer."""

    rank: int
    fate: str


class RankError(AssertionError):
    """Some ranks of a run failed, died or did not answer."""


class RankPool:
    """Workers that run a function on ranks of a fresh Gloo group each time; as many as were ever needed at once."""

    def __init__(self):
        self._workers = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = itertools.count()

    def run(self, function, world_size, *args, timeout=60, expect_errors=False, **kwargs):
        """`function(rank, world_size, *args, **kwargs)` on every rank; the ranks' results, in order.

        With `expect_errors` a rank that raised is answered by its RankFailure, one without an answer by a LostRank.
        """
        self._start(world_size)
        run = str(next(self._runs))
        workers = self._workers[:world_size]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((run, function, rank, world_size, args, kwargs))
        deadline = time.monotonic() + timeout
        try:
            answers = [self._answer(rank, worker, deadline) for rank, worker in enumerate(workers)]
        except BaseException:  # a test's time limit, whose late answers are none of the next run's
            self._replace(world_size)
            raise
        lost = [answer for answer in answers if isinstance(answer, LostRank)]
        failures = [answer for answer in answers if isinstance(answer, RankFailure)]
        if lost or failures:
            self._replace(world_size)
        if (lost or failures) and not expect_errors:
            fates = [f"rank {each.rank} {each.fate}" for each in lost]
            raise RankError("\n".join([*fates, *(f"rank {f.rank}:\n{f.traceback}" for f in failures)]))
        return answers

    def close(self):
        """End all workers; returns their exit codes."""
        for _, pipe in self._workers:
            pipe.send(None)
        for process, _ in self._workers:
            process.join(20)
        codes = [process.exitcode for process, _ in self._workers]
        self._replace(len(self._workers))
        return codes

    def _start(self, count):
        context, fresh = multiprocessing.get_context(START), []
        while len(self._workers) + len(fresh) < count:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            fresh.append((process, mine))
        for process, pipe in fresh:
            if not pipe.poll(STARTED):
                raise RankError(f"a worker is not up after {STARTED} s: {process}")
            pipe.recv()
        self._workers += fresh

    def _answer(self, rank, worker, deadline):
        process, pipe = worker
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                return LostRank(rank, "did not answer in time")
            return torch.load(io.BytesIO(pipe.recv()), weights_only=False)
        except EOFError:
            process.join(20)
            return LostRank(rank, f"died with exit code {process.exitcode}")

    def _replace(self, count):
        for process, pipe in self._workers[:count]:
            process.kill()
            process.join()
            pipe.close()
        del self._workers[:count]


def _serve(pipe, port):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # or each collection goes through all of torch
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send("up")
    while (job := pipe.recv()) is not None:
        run, *job = job
        buffer = io.BytesIO()
        torch.save(_run(dist.PrefixStore(run, store), *job), buffer)
        pipe.send(buffer.getvalue())
        gc.collect()
        gc.freeze()  # what a test leaves, such as the compiler, would make each later collection as dear


def _run(store, function, rank, world_size, args, kwargs):
    torch.manual_seed(0)
    environment = dict(os.environ)
    began = time.monotonic()
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
        began = time.monotonic()
        result = function(rank, world_size, *args, **kwargs)
        dist.barrier()
        return result
    except Exception as error:
        seconds = time.monotonic() - began
        return RankFailure(rank, type(error).__name__, str(error), traceback.format_exc(), seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is not None and compiler.cached_backends:  # this process serves other tests as well
            torch._dynamo.reset()
        debug._clear_sharding_prop_cache()  # it has names of groups that are gone, for meshes alike
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
