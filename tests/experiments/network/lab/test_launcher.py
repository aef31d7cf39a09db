import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.network.lab import NetlabConfig, launcher, rerun_on_hosts, run_on_hosts
from gradwire.experiments.network.lab.hosts import NetlabError, left_by
from gradwire.experiments.network.lab.utilization import Utilization
from gradwire.experiments.network.link import parse_rate
from gradwire.experiments.ranks.launchers import LAB_VARIABLE
from gradwire.experiments.ranks.own_command import own_command

from ...running import PATIENCE, alive, shell, wait_for


def test_every_host_gets_the_variables_of_a_launcher(possible, capfd, tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", LAB_VARIABLE)
    line = " ".join(f"${name}" for name in names)
    command = shell(f'echo {line} > {tmp_path}/$RANK; echo "rank $RANK"')
    assert main(["netlab", "--hosts", "3", "--rate", "100mbit", "--", *command]) == 0
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 3 0 1 wire 3 hosts at 100 Mbit/s\n"
    assert capfd.readouterr().out == "rank 0\n"
    assert left_by(os.getpid()) == []


def test_ranks_of_a_host_share_its_network(possible, capfd, tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", LAB_VARIABLE)
    line = " ".join(f"${name}" for name in names)
    command = shell(f"echo {line} $(readlink /proc/self/ns/net) > {tmp_path}/$RANK; exit $((RANK == 3))")
    assert run_on_hosts(NetlabConfig(2, "100mbit", ranks_per_host=2), command) == 1
    told = [(tmp_path / str(rank)).read_text().rpartition(" ") for rank in range(4)]
    assert [words for words, _, _ in told] == [
        f"{rank} 4 {rank % 2} 2 2 hosts of 2 ranks at 100 Mbit/s" for rank in range(4)
    ]
    networks = [network for _, _, network in told]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert capfd.readouterr().err == "netlab: rank 3 on host 1 ended with exit code 1\n"


def test_the_first_rank_that_fails_ends_the_others_and_shows_what_it_said(possible, capfd, tmp_path):
    began = time.monotonic()
    others = f"[ $RANK = 1 ] || {{ echo $$ > {tmp_path}/$RANK; exec sleep 600; }}"
    until_there = f"until [ -s {tmp_path}/0 ] && [ -s {tmp_path}/2 ]; do sleep 0.05; done"
    command = f"{others}; {until_there}; echo said; echo so >&2; exit 7"
    assert run_on_hosts(NetlabConfig(3), shell(command)) == 7
    assert time.monotonic() - began < PATIENCE
    assert capfd.readouterr().err == "host 1: said\nhost 1: so\nnetlab: host 1 ended with exit code 7\n"
    assert not any(alive(int((tmp_path / rank).read_text())) for rank in ("0", "2"))
    assert left_by(os.getpid()) == []


def test_a_rank_ended_by_a_signal_has_the_exit_code_that_shells_give_it(possible):
    assert run_on_hosts(NetlabConfig(2), shell("[ $RANK = 0 ] && kill -9 $$; sleep 60")) == 128 + signal.SIGKILL


def test_what_a_rank_leaves_running_on_its_host_is_ended(possible, tmp_path):
    command = f"setsid sleep 600 & echo $! > {tmp_path}/$RANK"
    assert run_on_hosts(NetlabConfig(2), shell(command)) == 0
    for rank in "01":
        wait_for(lambda rank=rank: not alive(int((tmp_path / rank).read_text())))


def test_an_interrupt_amid_a_poll_leaves_no_wait_without_an_end(monkeypatch):
    monkeypatch.setattr(launcher, "SURVIVOR_SECONDS", 0.1)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        process._waitpid_lock.acquire()  # as an interrupt leaves it that comes between taking it and the try behind
        began = time.monotonic()
        launcher._end([process])
        assert time.monotonic() - began < PATIENCE
        process._waitpid_lock.release()
        assert process.wait(PATIENCE) == -signal.SIGTERM


def test_compare_runs_itself_on_every_host(possible, capfd, monkeypatch):
    arguments = ["compare", "--netlab.hosts=2", "--netlab.rate=1gbit", "--compressors=none"]
    monkeypatch.setattr(sys, "executable", "echo")
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    assert main(arguments) == 0
    assert capfd.readouterr().out == " ".join(own_command(*arguments)[1:]) + "\n"


def test_bench_dilates_the_links_of_its_lab(monkeypatch):
    given, lab = [], ["--netlab.hosts=2", "--netlab.rate=1000mbit"]
    monkeypatch.setattr(
        "gradwire.experiments.bench.command.rerun_on_hosts", lambda lab: given.append(lab.described) or 0
    )
    assert main(["bench", *lab, "--compute=emulate:resnet18-cifar@0.02", "--dilate=2"]) == 0
    assert given == ["2 hosts at 500 Mbit/s"]


@pytest.mark.thorough
def test_bench_measures_on_the_hosts_of_its_lab(possible, tmp_path):
    file, use = tmp_path / "bench.json", tmp_path / "use.json"
    lab = ["--netlab.hosts=2", "--netlab.rate=1000mbit", f"--netlab.utilization={use}"]
    slowed = ["--compute=emulate:resnet18-cifar@0.02", "--dilate=2"]
    short = ["--world-sizes=2", "--steps=2", "--warmup=1", f"--json={file}"]
    command = [sys.executable, "-m", "gradwire", "bench", *lab, *slowed, *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["model"], row["world_size"], row["machines"]) == ("resnet18-cifar", 2, 2)
    labels = ["emulated compute resnet18-cifar, 0.02 s per step", "dilated 2", "netlab: 2 hosts at 500 Mbit/s"]
    assert row["labels"] == labels
    assert all(f"NOT REAL: {label}" in done.stdout for label in labels)
    assert "started by netlab" in done.stdout
    assert parse_rate(Utilization.read(use).rate) == parse_rate("500mbit")
    assert row["sent_bytes_per_step"] == 4 * 11_173_962
    assert min(row["seconds"]) > 0.9 * 8 * row["sent_bytes_per_step"] / 500e6  # twice what the rate as given takes


def test_again_does_nothing_without_a_lab_or_inside_one(monkeypatch):
    assert rerun_on_hosts(NetlabConfig()) is None
    monkeypatch.setenv(LAB_VARIABLE, "2 hosts at 1gbit")
    assert rerun_on_hosts(NetlabConfig(2, "1gbit")) is None


def test_labs_do_not_nest_and_are_not_made_by_ranks_of_another_launcher(monkeypatch):
    monkeypatch.setenv(LAB_VARIABLE, "2 hosts at 1gbit")
    with pytest.raises(NetlabError, match="do not nest"):
        run_on_hosts(NetlabConfig(2), ["ls"])
    monkeypatch.delenv(LAB_VARIABLE)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(NetlabError, match="without torchrun"):
        run_on_hosts(NetlabConfig(2), ["ls"])
