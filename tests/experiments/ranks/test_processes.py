"""A `gradwire compare` that does not get to its end."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Thread

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.compare import command as driver
from gradwire.experiments.ranks import processes as ranks_module
from gradwire.experiments.ranks.group import joined
from gradwire.experiments.ranks.processes import run_ranks
from gradwire.experiments.workloads import training

from ..given import results_of, run_of
from ..running import PARENT, PATIENCE, SESSION, processes, spawned, wait_for

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by Linux's /proc"),
    pytest.mark.timeout(300),
]
COMPRESSORS = ("none", *(f"powersgd:rank={rank}" for rank in range(1, 32)))


def members(session):
    return processes(SESSION, session)


def own_ranks():
    """The ranks of this process, which are forked from its server."""
    forkserver.ensure_running()
    return processes(PARENT, forkserver._forkserver._forkserver_pid)


def finished(out):
    """Compressors with a result so far."""
    file = out / "results.json"
    return [run["compressor"] for run in json.loads(file.read_text())["runs"]] if file.exists() else []


@pytest.fixture
def arguments(tmp_path):
    """A comparison that takes long, of a small model on little text, one compressor after the other."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 100)
    model = ["--model=gpt", "--model.width=32", "--model.layers=1", "--model.context=16"]
    length = ["--turns=false", "--steps=10", "--eval-batches=1", f"--compressors={','.join(COMPRESSORS)}"]
    return ["compare", *model, *length, "--data=text", f"--data.path={text}", f"--out={tmp_path / 'out'}"]


@contextmanager
def session(arguments):
    """A `gradwire` in a session of its own, of which nothing is left at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for left in members(process.pid):
            os.kill(left, signal.SIGKILL)
        process.communicate()


def ended(process, within):
    """The exit code and the output of a process that must end soon, and whose session must be empty soon after."""
    output, _ = process.communicate(timeout=within)
    wait_for(lambda: not members(process.pid), "end of all processes")
    return process.returncode, output


@contextmanager
def acting_on_ranks(out, act):
    """Call `act` with the ranks of this process once `out` has a first result, while the body runs the comparison."""
    others = own_ranks()

    def wait_and_act():
        wait_for(lambda: finished(out), "first result")
        act(own_ranks() - others)

    thread = Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()
    wait_for(lambda: not own_ranks() - others, "end of all ranks")


def check_kept(out):
    """The results are those of the first compressors, and have been drawn and reported."""
    kept = finished(out)
    assert 1 <= len(kept) < len(COMPRESSORS)
    assert kept == list(COMPRESSORS[: len(kept)])
    assert {"loss.png", "tradeoff.png", "report.html"} <= {file.name for file in out.iterdir()}


@pytest.mark.slow
def test_ctrl_c_keeps_what_had_finished_and_leaves_no_process(arguments, tmp_path):
    with session(arguments) as process:
        wait_for(lambda: finished(tmp_path / "out"), "first result")
        assert len(spawned(processes(PARENT, process.pid))) == 2
        os.killpg(process.pid, signal.SIGINT)
        code, output = ended(process, within=PATIENCE)
    assert code == 130
    assert "stopped; finished results are kept" in output
    assert "Traceback" not in output
    check_kept(tmp_path / "out")


def test_an_interrupt_while_ranks_start_leaves_no_process(monkeypatch, quick_start):
    monkeypatch.setattr(ranks_module.multiprocessing, "start_processes", quick_start)
    started = []

    def interrupted(process):
        if started:
            raise KeyboardInterrupt
        started.append(process)
        start(process)

    start = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(wait_for_peers, 2)
    assert not started[0].is_alive()


def hold_after_the_first(rank, rendezvous, config, backend, out):
    """A rank that trains with one compressor, and then waits for its end."""
    loss_of = training.loss_of

    def holding(*inputs, **options):
        if finished(Path(out)):
            time.sleep(10 * PATIENCE)
        return loss_of(*inputs, **options)

    training.loss_of = holding
    driver.rank_main(rank, rendezvous, config, backend, out)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_is_named(arguments, undrawn, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driver, "rank_main", hold_after_the_first)
    with acting_on_ranks(tmp_path / "out", lambda ranks: os.kill(max(ranks), signal.SIGKILL)):
        code = main([*arguments, "--model=mlp", "--data=digits", "--data.path=null"])
    assert code == 1
    told = capsys.readouterr().err
    assert "a rank failed; finished results are kept" in told
    assert "rank 1: process 1 terminated with signal SIGKILL" in told
    check_kept(tmp_path / "out")


def wait_for_peers(rank, rendezvous):
    """A rank that does nothing without the others."""
    with joined("gloo", timedelta(seconds=60), rendezvous):
        pass


def wait_for_the_end(rank, rendezvous, folder):
    """A rank that writes down its process id and sleeps."""
    (folder / "part").write_text(str(os.getpid()))
    (folder / "part").rename(folder / "rank")
    time.sleep(10 * PATIENCE)


@pytest.mark.slow
def test_ranks_die_with_the_process_that_started_them_however_it_ends(tmp_path, monkeypatch, quick_start):
    monkeypatch.setattr(ranks_module.multiprocessing, "start_processes", quick_start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the killed one leaves its folder
    parent = multiprocessing.get_context("fork").Process(target=run_ranks, args=(wait_for_the_end, 1, tmp_path))
    parent.start()
    try:
        wait_for((tmp_path / "rank").exists, "rank")
        (rank,) = spawned(processes(PARENT, parent.pid))
        assert rank == int((tmp_path / "rank").read_text())
    finally:
        parent.kill()
        parent.join()
    try:
        wait_for(lambda: rank not in members(os.getsid(0)), "end of the rank")
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def fail_in_a_step(rank, *arguments):
    """Ranks of which one raises in its third step, while the other waits for it."""
    if rank == 1:
        steps, loss_of = count(), training.loss_of

        def failing(*inputs, **options):
            if next(steps) == 2:
                raise LookupError("the culprit's own words")
            return loss_of(*inputs, **options)

        training.loss_of = failing
    driver.rank_main(rank, *arguments)


def test_a_rank_that_raises_ends_the_run_with_its_traceback(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driver, "rank_main", fail_in_a_step)
    (tmp_path / "out").mkdir()
    results_of(run_of()).write(tmp_path / "out" / "results.json")
    assert main([*arguments, "--compressors=onebit"]) == 1
    told = capsys.readouterr()
    assert "a rank failed; finished results are kept.\nrank 1:\nTraceback" in told.err
    assert re.search(r"in failing\n.*\nLookupError: the culprit's own words", told.err)
    assert "accuracy" not in told.out  # the results of an earlier run are not shown as this one's
