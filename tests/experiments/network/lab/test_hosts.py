import json
import multiprocessing
import os
import signal
import subprocess

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.network.lab import NetlabConfig, run_on_hosts
from gradwire.experiments.network.lab.hosts import OWNERS, NetlabError, clean, interfaces_of, left_by, temporary_lab

from ...running import PATIENCE, alive, shell, wait_for


@pytest.mark.parametrize("options", [{}, {"down": "50mbit"}, {"down": "50mbit", "delay": "1ms", "loss": "1%"}])
def test_both_ends_of_every_link_are_limited_and_share_no_subnet_with_this_machine(possible, options):
    with temporary_lab(NetlabConfig(2, "20mbit", **options)) as lab:
        for where in (["dev", lab.port(0)], ["dev", lab.port(1)]):
            (limit,) = json.loads(subprocess.check_output(["tc", "-json", "qdisc", "show", *where]))
            assert (limit["kind"], limit["options"]["rate"]) == ("tbf", (50e6 if options else 20e6) / 8)
        for host in range(2):
            inside = ["tc", "-netns", lab.namespace(host), "-json", "qdisc", "show", "dev", "wire"]
            (limit,) = json.loads(subprocess.check_output(inside))
            assert (limit["kind"], limit["options"]["rate"]) == ("tbf", 20e6 / 8)
        addresses = json.loads(subprocess.check_output(["ip", "-json", "-4", "addr"]))
        mine = [each["local"] for interface in addresses for each in interface["addr_info"]]
        assert not any(address.startswith(str(lab.subnet.network_address)[:-1]) for address in mine)
    assert left_by(os.getpid()) == []


@pytest.fixture
def options():
    """Those of the lab, beside its hosts and rate."""
    return {}


@pytest.fixture
def running_lab(possible, tmp_path, options):
    """A process with a lab in which two hosts sleep; and the processes of the hosts."""
    command = shell(f"echo $$ > {tmp_path}/$RANK.part; mv {tmp_path}/$RANK.part {tmp_path}/$RANK; exec sleep 600")
    process = multiprocessing.get_context("fork").Process(target=hold, args=(command, options))
    process.start()
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    yield process, [int((tmp_path / rank).read_text()) for rank in "01"]
    process.kill()
    process.join()
    clean()


def hold(command, options):
    """In a process of its own: a lab, until it is told to end."""
    try:
        run_on_hosts(NetlabConfig(2, "10mbit", **options), command)
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


@pytest.mark.parametrize(("options", "made"), [({}, 5), ({"delay": "1ms"}, 4)], ids=["bridge", "switch"])
def test_what_a_killed_lab_leaves_is_removed_at_the_next_start_and_its_ranks_die_with_it(running_lab, made):
    owner, hosts = running_lab
    assert len(left_by(owner.pid)) == made
    owner.kill()
    owner.join()
    wait_for(lambda: not any(map(alive, hosts)))
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
        # a lab that another test makes in this moment may have removed them first
        assert capsys.readouterr().out in (f"removed the labs of {owner.pid}\n", "nothing was left behind\n")
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
