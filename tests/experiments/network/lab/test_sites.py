"""Sites on hosts of a lab that reach the rendezvous alone, as behind NAT: they train through its relay."""

import json

import torch

from gradwire import compressor
from gradwire.experiments.network.lab import NetlabConfig
from gradwire.experiments.network.lab.hosts import run, temporary_lab
from gradwire.experiments.sites_plan import Wan, round_plan

from ....forked import Script
from ...running import wait_for

SITES, SIDE, SPEC, SECRET = 4, 512, "int4", "of this test, and nobody else's"
HERE = """
import ctypes, os, sys, time
from pathlib import Path
namespace = os.open(f"/var/run/netns/{sys.argv[1]}", os.O_RDONLY)
assert ctypes.CDLL(None).setns(namespace, 0x40000000) == 0
"""
SERVER = """
from gradwire.hooks.internet.server import Server
server = Server(sys.argv[2], 0, sys.argv[4], relay=True)
Path(sys.argv[3], "port.part").write_text(str(server.port))
Path(sys.argv[3], "port.part").rename(Path(sys.argv[3], "port"))
while not Path(sys.argv[3], "over").exists():
    time.sleep(0.05)
server.close()
"""
SITE = """
import json, socket, threading
from datetime import timedelta
import torch
import gradwire
_, _, address, other, place, count, side, spec, secret = sys.argv
found = {}

def dial():
    try:
        socket.create_connection((other, 9), 20)
    except OSError as error:
        found["dialed"] = type(error).__name__

def sent():
    return int(next(line for line in Path("/proc/net/dev").read_text().splitlines() if "wire" in line).split()[9])

dialing = threading.Thread(target=dial)
dialing.start()
torch.manual_seed(int(place))
model = torch.nn.Linear(int(side), int(side), bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
at = gradwire.Rendezvous(address, int(count), name=f"site {place}", limit=timedelta(seconds=60), secret=secret)
local = gradwire.LocalSteps(model, optimizer, every=2, fragments=1, overlap=False, compressor=spec, at=at)
before = sent()
for step in range(6):
    model.weight.grad = torch.randn(int(side), int(side))
    optimizer.step()
found["link"] = sent() - before
found["rounds"] = [each.sent_bytes for each in local.history[1:]]
found["listens"] = any(line.split()[3] == "0A" for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
local.finish()
found["model"] = model.weight.sum().item()
dialing.join()
print(json.dumps(found))
"""


def test_four_sites_that_only_dial_out_train_through_a_relay_and_send_what_the_plan_says(possible, tmp_path):
    with temporary_lab(NetlabConfig(SITES + 1)) as lab:
        for host in range(SITES):  # these reach the rendezvous, and not each other
            run("ip", "link", "set", lab.port(host), "type", "bridge_slave", "isolated", "on")
        server = Script(HERE + SERVER, lab.namespace(SITES), lab.address(SITES), tmp_path, SECRET)
        wait_for((tmp_path / "port").exists)
        address = f"{lab.address(SITES)}:{(tmp_path / 'port').read_text()}"
        given = [(lab.namespace(host), address, lab.address((host + 1) % SITES), host) for host in range(SITES)]
        sites = [Script(HERE + SITE, *each, SITES, SIDE, SPEC, SECRET) for each in given]
        ended = [site.end() for site in sites]
        (tmp_path / "over").touch()
        assert server.end().code == 0
    assert [each.code for each in ended] == [0] * SITES, ended
    found = [json.loads(each.out) for each in ended]
    assert len({each["model"] for each in found}) == 1
    assert {each["dialed"] for each in found} <= {"OSError", "TimeoutError"}  # no route, and nobody who refuses
    assert not any(each["listens"] for each in found)
    planned = round_plan(compressor(SPEC), {"weight": torch.empty(SIDE, SIDE)}, Wan(SITES, 1.0, 1.0, relay=True)).up
    for each in found:
        assert all(0 <= sent - planned < 1100 for sent in each["rounds"])
        assert 1.0 < each["link"] / sum(each["rounds"]) < 1.15  # with the heads of packets, and the rendezvous
