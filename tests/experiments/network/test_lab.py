import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.network.lab import (
    NetlabConfig,
    check_lab,
    iproute,
    labels,
    launcher,
    rerun_on_hosts,
    run_on_hosts,
)
from gradwire.experiments.network.lab.check import report_rate
from gradwire.experiments.network.lab.hosts import OWNERS, clean, interfaces_of, left_by, temporary_lab
from gradwire.experiments.network.lab.iproute import NetlabError
from gradwire.experiments.network.lab.picture import draw
from gradwire.experiments.network.lab.recorder import recorded, write_and_draw
from gradwire.experiments.network.lab.utilization import Utilization
from gradwire.experiments.ranks.launchers import LAB_VARIABLE, lab_here
from gradwire.experiments.sweep import SweepConfig

PATIENCE = 30
MEGABYTE = 10**6
SENT = 4 * MEGABYTE
TRIES = 3  # other work delays the ranks
# Host 1 sends to host 0, which tells how long that took.
TRANSFER = f"""
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        peer, _ = server.accept()
        began, received = time.perf_counter(), 0
        while piece := peer.recv(65536):
            received += len(piece)
        print("received", received, time.perf_counter() - began)
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(bytes({SENT}))
"""


def why_not():
    """Why no lab can be made here; empty where one can."""
    try:
        with temporary_lab(NetlabConfig(hosts=1, rate="1mbit")):
            return ""
    except NetlabError as error:
        return str(error)


@pytest.fixture(scope="session")
def possible():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in (LAB_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def alive(process):
    """Whether a process runs, and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def shell(text):
    return ["sh", "-c", text]


def test_every_host_gets_the_variables_of_a_launcher(possible, capfd, tmp_path):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", LAB_VARIABLE)
    line = " ".join(f"${name}" for name in names)
    assert run_on_hosts(NetlabConfig(3, "100mbit"), shell(f'echo {line} > {tmp_path}/$RANK; echo "rank $RANK"')) == 0
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 3 0 1 wire 3 hosts at 100mbit\n"
    assert capfd.readouterr().out == "rank 0\n"
    assert left_by(os.getpid()) == []


def test_both_ends_of_every_link_are_limited_and_share_no_subnet_with_this_machine(possible):
    with temporary_lab(NetlabConfig(2, "20mbit")) as lab:
        for where in (["dev", lab.port(0)], ["dev", lab.port(1)]):
            (limit,) = json.loads(subprocess.check_output(["tc", "-json", "qdisc", "show", *where]))
            assert (limit["kind"], limit["options"]["rate"]) == ("tbf", 20e6 / 8)
        for host in range(2):
            inside = ["tc", "-netns", lab.namespace(host), "-json", "qdisc", "show", "dev", "wire"]
            (limit,) = json.loads(subprocess.check_output(inside))
            assert (limit["kind"], limit["options"]["rate"]) == ("tbf", 20e6 / 8)
        addresses = json.loads(subprocess.check_output(["ip", "-json", "-4", "addr"]))
        mine = [each["local"] for interface in addresses for each in interface["addr_info"]]
        assert not any(address.startswith(str(lab.subnet.network_address)[:-1]) for address in mine)
    assert left_by(os.getpid()) == []


def test_a_link_carries_its_rate_and_its_use_is_written_down(possible, capfd, tmp_path):
    file = tmp_path / "use.json"
    assert run_on_hosts(NetlabConfig(2, "50mbit", str(file)), [sys.executable, "-S", "-c", TRANSFER]) == 0
    shown = capfd.readouterr().out.splitlines()
    word, received, seconds = shown[0].split()
    assert (word, int(received)) == ("received", SENT)
    assert 0.6 * 50e6 < 8 * SENT / float(seconds) < 1.2 * 50e6  # the clock may start late, and the machine be busy
    assert shown[1].startswith("utilization")
    assert (tmp_path / "use.png").exists()
    use = Utilization.read(file)
    assert (use.network, use.rate) == ("2 hosts at 50mbit", "50mbit")
    frames = use.links["1"]["sent_bytes"][-1]
    assert SENT < frames < 1.1 * SENT
    assert use.links["0"]["received_bytes"][-1] == pytest.approx(frames, rel=0.05)
    begin, end = use.busy(1)
    assert begin < end <= use.seconds[-1]


def test_the_first_rank_that_fails_ends_the_others_and_shows_what_it_said(possible, capfd, tmp_path):
    began = time.monotonic()
    command = (
        f"[ $RANK = 1 ] || {{ echo $$ > {tmp_path}/$RANK; exec sleep 600; }}; sleep 1; echo said; echo so >&2; exit 7"
    )
    assert run_on_hosts(NetlabConfig(3), shell(command)) == 7
    assert time.monotonic() - began < PATIENCE
    assert capfd.readouterr().err == "host 1: said\nhost 1: so\nnetlab: host 1 ended with exit code 7\n"
    assert not any(alive(int((tmp_path / rank).read_text())) for rank in ("0", "2"))
    assert left_by(os.getpid()) == []


def test_every_rank_that_fails_by_itself_is_shown_the_first_first(possible, capfd, monkeypatch):
    monkeypatch.setattr(launcher, "VICTIM_SECONDS", PATIENCE)
    command = '[ $RANK = 0 ] && exit; [ $RANK = 1 ] || sleep 0.5; echo "words of $RANK"; exit $RANK'
    assert run_on_hosts(NetlabConfig(3), shell(command)) == 1
    told = [f"host {rank}: words of {rank}\nnetlab: host {rank} ended with exit code {rank}\n" for rank in (1, 2)]
    assert capfd.readouterr().err == "".join(told)


def test_the_exit_codes_of_ranks_that_fail_by_themselves_are_known_a_moment_after_the_first_failure(monkeypatch):
    monkeypatch.setattr(launcher, "VICTIM_SECONDS", 1.0)
    commands = ["exec sleep 600", "exit 0", "sleep 0.3; kill -9 $$", "exit 7"]
    processes = [subprocess.Popen(shell(command)) for command in commands]
    failures = launcher._failures(processes)
    processes[0].kill()
    assert list(failures.items()) == [(3, 7), (2, 128 + signal.SIGKILL)]
    assert processes[0].wait() == -signal.SIGKILL


def test_a_rank_ended_by_a_signal_has_the_exit_code_that_shells_give_it(possible):
    assert run_on_hosts(NetlabConfig(2), shell("[ $RANK = 0 ] && kill -9 $$; sleep 60")) == 128 + signal.SIGKILL


def test_what_a_rank_leaves_running_on_its_host_is_ended(possible, tmp_path):
    command = f"setsid sleep 600 & echo $! > {tmp_path}/$RANK"
    assert run_on_hosts(NetlabConfig(2), shell(command)) == 0
    for rank in "01":
        wait_for(lambda rank=rank: not alive(int((tmp_path / rank).read_text())))


@pytest.fixture
def running_lab(possible, tmp_path):
    """A process with a lab in which two hosts sleep; and the processes of the hosts."""
    command = shell(f"echo $$ > {tmp_path}/$RANK.part; mv {tmp_path}/$RANK.part {tmp_path}/$RANK; exec sleep 600")
    process = multiprocessing.get_context("fork").Process(target=hold, args=(command,))
    process.start()
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    yield process, [int((tmp_path / rank).read_text()) for rank in "01"]
    process.kill()
    process.join()
    clean()


def hold(command):
    """In a process of its own: a lab, until it is told to end."""
    try:
        run_on_hosts(NetlabConfig(2, "10mbit"), command)
    except KeyboardInterrupt:
        os._exit(130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lab_that_is_told_to_end_leaves_nothing(running_lab, number):
    owner, hosts = running_lab
    os.kill(owner.pid, number)
    owner.join(PATIENCE)
    assert owner.exitcode == 130
    assert left_by(owner.pid) == []
    assert not any(map(alive, hosts))


def test_what_a_killed_lab_leaves_is_removed_at_the_next_start_and_its_ranks_die_with_it(running_lab):
    owner, hosts = running_lab
    assert len(left_by(owner.pid)) == 5
    owner.kill()
    owner.join()
    wait_for(lambda: not any(map(alive, hosts)))
    assert len(left_by(owner.pid)) == 5
    with temporary_lab(NetlabConfig(1)) as lab:
        assert left_by(owner.pid) == []
        assert len(left_by(lab.owner)) == 3


def test_clean_removes_what_dead_owners_left_and_nothing_else(running_lab, capsys):
    owner, hosts = running_lab
    foreign = f"gwl{2**22 + 1}b"  # like ours, but not made by us: no process has this id
    subprocess.run(["ip", "link", "add", foreign, "type", "bridge"], check=True)
    try:
        assert main(["netlab", "--clean"]) == 0
        assert capsys.readouterr().out == "nothing was left behind\n"
        assert len(left_by(owner.pid)) == 5
        assert all(map(alive, hosts))
        owner.kill()
        owner.join()
        assert main(["netlab", "--clean"]) == 0
        assert capsys.readouterr().out == f"removed the labs of {owner.pid}\n"
        assert left_by(owner.pid) == []
        assert interfaces_of(2**22 + 1) == [foreign]
    finally:
        subprocess.run(["ip", "link", "del", foreign], check=True)


@pytest.mark.parametrize(
    ("kind", "name", "details"),
    [("link", f"gwl{os.getpid()}b", ("type", "bridge")), ("netns", f"gradwire-{os.getpid()}-0", ())],
    ids=["interface", "namespace"],
)
def test_what_another_container_made_under_the_same_process_id_is_left_alone(possible, kind, name, details):
    subprocess.run(["ip", kind, "add", name, *details], check=True)
    try:
        with pytest.raises(NetlabError, match=f"there is {name} already"), temporary_lab(NetlabConfig(1)):
            pass
        assert left_by(os.getpid()) == [name]
        assert not (OWNERS / str(os.getpid())).exists()
    finally:
        subprocess.run(["ip", kind, "del", name], check=True)


def test_again_runs_the_same_command_line_on_every_host(possible, capfd, monkeypatch):
    monkeypatch.setattr(sys, "executable", "echo")
    monkeypatch.setattr(sys, "argv", ["gradwire", "compare", "--netlab.hosts=2"])
    assert rerun_on_hosts(NetlabConfig(2)) == 0
    assert capfd.readouterr().out == "-m gradwire compare --netlab.hosts=2\n"


def test_compare_runs_itself_on_every_host(possible, capfd, monkeypatch):
    arguments = ["compare", "--netlab.hosts=2", "--netlab.rate=1gbit", "--compressors=none"]
    monkeypatch.setattr(sys, "executable", "echo")
    monkeypatch.setattr(sys, "argv", ["gradwire", *arguments])
    assert main(arguments) == 0
    assert capfd.readouterr().out == f"-m gradwire {' '.join(arguments)}\n"


def test_bench_dilates_the_links_of_its_lab(possible, tmp_path):
    file, use = tmp_path / "bench.json", tmp_path / "use.json"
    lab = ["--netlab.hosts=2", "--netlab.rate=1000mbit", f"--netlab.utilization={use}"]
    slowed = ["--compute=emulate:resnet18-cifar@0.02", "--dilate=2"]
    short = ["--world-sizes=2", "--steps=2", "--warmup=1", f"--json={file}"]
    command = [sys.executable, "-m", "gradwire", "bench", *lab, *slowed, *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["benchmark_results"]
    assert (row["model"], row["world_size"], row["machines"]) == ("resnet18-cifar", 2, 2)
    assert row["labels"] == [
        "emulated compute resnet18-cifar, 0.02 s a step",
        "dilated 2",
        "netlab: 2 hosts at 500mbit",
    ]
    assert all(f"* NOT REAL: {label}" in done.stdout for label in row["labels"])
    assert "started by netlab" in done.stdout
    assert Utilization.read(use).rate == "500mbit"
    assert row["sent_bytes_per_step"] == 4 * 11_173_962
    assert min(row["seconds"]) > 0.9 * 8 * row["sent_bytes_per_step"] / 500e6  # twice what the rate as given takes


def test_again_does_nothing_without_a_lab_or_inside_one(monkeypatch):
    assert rerun_on_hosts(NetlabConfig()) is None
    monkeypatch.setenv(LAB_VARIABLE, "2 hosts at 1gbit")
    assert rerun_on_hosts(NetlabConfig(2, "1gbit")) is None


def test_labels_tell_of_labs_and_emulated_links(monkeypatch):
    assert (lab_here(), labels()) == (None, [])
    assert labels("100mbit") == ["emulated link 100mbit"]
    monkeypatch.setenv(LAB_VARIABLE, "4 hosts at 1gbit")
    assert (lab_here(), labels()) == ("4 hosts at 1gbit", ["netlab: 4 hosts at 1gbit"])


REFUSALS = {
    "platform": (lambda patch: patch.setattr(sys, "platform", "darwin"), "only Linux has"),
    "tools": (lambda patch: patch.setattr(iproute.shutil, "which", lambda tool: None), "install iproute2"),
    "root": (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "sudo -E"),
}


@pytest.mark.parametrize("missing", REFUSALS)
def test_a_machine_that_can_have_no_lab_is_told_what_to_do_instead(missing, monkeypatch, capsys):
    change, reason = REFUSALS[missing]
    with monkeypatch.context() as patch:
        if missing != "platform":
            patch.setattr(sys, "platform", "linux")
        if missing == "root":
            patch.setattr(iproute.shutil, "which", lambda tool: f"/sbin/{tool}")
        change(patch)
        with pytest.raises(NetlabError, match=reason) as refused:
            iproute.require()
    assert "--link 100mbit" in str(refused.value)


def test_what_iproute2_refuses_is_told_with_its_words(possible):
    with pytest.raises(NetlabError, match=r"ip link show nothing.*does not exist.*NET_ADMIN.*--link 100mbit"):
        iproute.run("ip", "link", "show", "nothing")


@pytest.mark.parametrize(
    ("arguments", "told_of"),
    [
        ([], "--check"),
        (["--hosts=4", "--check", "--", "ls"], "or --check"),
        (["--", "ls"], "hosts is at least 1"),
        (["--hosts=100", "--", "ls"], "0 to 99"),
        (["--hosts=2", "--rate=fast", "--", "ls"], "such as 100mbit"),
        (["--hosts=1", "--rate=1gbit", "--check"], "two hosts and a rate"),
        (["--hosts=2", "--check"], "two hosts and a rate"),
        (["--hosts=2", "--", "no-such-command"], "no such command"),
        (["--hosts=2", "--utilization=/nowhere/file.json", "--", "ls"], "utilization: there is no folder /nowhere"),
        (["--hosts=2", "--utilization=.", "--", "ls"], "utilization: . is a folder; name a file"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, told_of, capsys):
    assert main(["netlab", *arguments]) == 2
    assert told_of in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rate": "1gbit"}, "netlab.rate without"),
        ({"utilization": "use.json"}, "netlab.utilization without"),
        ({"rate": "1gbit", "utilization": "use.json"}, "netlab.rate and netlab.utilization without"),
    ],
)
def test_what_is_set_of_a_lab_without_hosts_is_refused_but_not_in_a_study_which_has_them(options, named):
    with pytest.raises(ValueError, match=f"^{named} hosts, .*: add --netlab.hosts 4, or leave it out$"):
        check_lab(NetlabConfig(**options))
    check_lab(NetlabConfig(hosts=2, **options))
    check_lab(NetlabConfig())
    assert SweepConfig(command="bench", netlab=NetlabConfig(**options)).lab.keys() == {f"netlab.{n}" for n in options}


def test_labs_do_not_nest_and_are_not_made_by_ranks_of_another_launcher(monkeypatch):
    monkeypatch.setenv(LAB_VARIABLE, "2 hosts at 1gbit")
    with pytest.raises(NetlabError, match="do not nest"):
        run_on_hosts(NetlabConfig(2), ["ls"])
    monkeypatch.delenv(LAB_VARIABLE)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(NetlabError, match="without torchrun"):
        run_on_hosts(NetlabConfig(2), ["ls"])


USE = Utilization(
    "2 hosts at 8mbit", "8mbit", 0.0, [0.0, 0.01, 0.02, 0.04, 0.05], {"0": {"sent_bytes": [5, 5, 10005, 20005, 20005]}}
)
SILENT = Utilization(
    "1 hosts without limits", "0", 0.0, [0.0, 0.01], {"0": {"sent_bytes": [0, 0], "received_bytes": [0, 0]}}
)


def test_utilization_is_in_mbit_a_second_of_what_was_counted_between_two_looks(tmp_path):
    assert USE.rates(0, "sent_bytes") == pytest.approx([0, 8, 4, 0])
    assert USE.busy(0) == (0.01, 0.04)


def test_a_link_without_traffic_is_drawn_too(tmp_path):
    assert draw(SILENT, tmp_path / "use.png") == tmp_path / "use.png"
    assert (tmp_path / "use.png").stat().st_size > 1000


def test_what_is_written_is_read_again(tmp_path):
    USE.write(tmp_path / "use.json")
    assert Utilization.read(tmp_path / "use.json") == USE
    (tmp_path / "other.json").write_text(json.dumps(dataclasses.asdict(USE)))
    with pytest.raises(ValueError, match="not what --utilization writes"):
        Utilization.read(tmp_path / "other.json")


def test_the_picture_is_put_beside_the_file(tmp_path, capsys):
    write_and_draw(SILENT, tmp_path / "use.json")
    assert capsys.readouterr().out == f"utilization  {tmp_path}/use.json\npicture      {tmp_path}/use.png\n"
    assert {file.name for file in tmp_path.iterdir()} == {"use.json", "use.png"}


def test_an_empty_name_is_no_file_for_the_use_of_links():
    with recorded(NetlabConfig(2, utilization=""), None):
        pass


def test_without_matplotlib_the_use_of_links_is_written_and_not_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "gradwire.experiments.network.lab.picture")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    write_and_draw(USE, tmp_path / "use.json")
    missing = "none: matplotlib is not installed; pip install 'gradwire[experiments]'"
    assert capsys.readouterr().out == f"utilization  {tmp_path}/use.json\npicture      {missing}\n"
    assert Utilization.read(tmp_path / "use.json") == USE
    assert not (tmp_path / "use.png").exists()


def test_the_check_measures_the_links_with_gloo(possible, capfd):
    for _ in range(TRIES):
        code = main(["netlab", "--hosts=2", "--rate=20mbit", "--check"])
        shown = capfd.readouterr().out
        payload = float(re.search(r"^payload +([\d.]+)", shown, re.MULTILINE)[1])
        assert payload < 20
        assert code == int(payload < 18)
        assert shown.startswith("2 hosts at 20mbit, Gloo's ring all-reduce")
        if code == 0:
            return
    pytest.fail(f"{TRIES} times more than 10 % off; last\n{shown}")


def test_the_check_fails_where_the_payload_is_more_than_a_tenth_off(capsys):
    config = NetlabConfig(4, "100mbit")
    assert [report_rate(payload, 12.5e6, config) for payload in (11.9e6, 11.3e6, 11.2e6, 13.8e6)] == [0, 0, 1, 1]
    assert "95.2%" in capsys.readouterr().out
