"""torchrun starts a training anew where a rank or a host has died: the same job goes on, also with fewer ranks."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import gradwire

from . import elastic_job
from .given import same

STEPS = 6
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"], {}  # words and variables


def start(torchrun, folder, fatal, *options):
    words, mine = torchrun
    mine = mine | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    job = [elastic_job.__file__, folder, str(STEPS), fatal]
    with open(Path(folder, f"log-{len(os.listdir(folder))}"), "w") as log:
        words = [*words, "--max-restarts", "3", "--monitor-interval", "0.1", *options, *job]
        return subprocess.Popen(words, env={**os.environ, **mine}, stdout=log, stderr=log)


def logs(folder):
    return "\n".join(path.read_text()[-3000:] for path in Path(folder).glob("log-*"))


def saved(folder, step):
    return torch.load(Path(folder, f"checkpoint.{step}"), weights_only=True)


def never_stopped(rank, world_size, folder):
    elastic_job.DEATH = STEPS  # nobody dies
    elastic_job.train(folder, STEPS, "nobody")


def by_hand(rank, world_size, folder):
    """The same from a checkpoint of two ranks, by the states of all of them: the mean of what they held back is owed."""
    path = Path(folder, "checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    states = list(saved["compression"]["ranks"])
    load = lambda handle, _: handle.load_state_dict(states, resize=True)  # noqa: E731
    with mock.patch.object(gradwire.Handle, "scatter_state_dict", load):
        elastic_job.train(folder, STEPS, "nobody")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_a_rank_was_killed_the_job_goes_on_in_the_same_bits(ranks, tmp_path, forked_python):
    job, whole = tmp_path / "job", tmp_path / "whole"
    job.mkdir()
    whole.mkdir()
    process = start(forked_python.torchrun(), str(job), "rank", "--standalone", "--nproc-per-node", "2")
    ranks.run(never_stopped, 2, str(whole))
    assert process.wait(150) == 0, logs(job)
    assert same(saved(job, STEPS), saved(whole, STEPS))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_a_host_was_killed_the_job_goes_on_with_fewer_ranks_and_loses_nothing(ranks, tmp_path, unused_port):
    meeting = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    meeting += ["--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{unused_port}"]
    stays = start(TORCHRUN, str(tmp_path), "host", *meeting, "--rdzv-conf", "is_host=1,last_call_timeout=1")
    dies = start(TORCHRUN, str(tmp_path), "host", *meeting, "--rdzv-conf", "is_host=0,last_call_timeout=1")
    assert stays.wait(150) == 0, logs(tmp_path)
    assert dies.wait(60) < 0
    assert (tmp_path / "done-0").read_text() == "1"
    before, after = saved(tmp_path, elastic_job.DEATH), saved(tmp_path, STEPS)
    assert [len(each["compression"]["ranks"]) for each in (before, after)] == [2, 1]
    assert after["compression"]["ranks"][0]["step"] == STEPS
    alone = tmp_path / "alone"
    alone.mkdir()
    torch.save(before, alone / "checkpoint.pt")
    ranks.run(by_hand, 1, str(alone))
    assert same(after, saved(alone, STEPS))
