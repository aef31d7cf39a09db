import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from gradwire.experiments.rendezvous import RendezvousConfig


def test_sites_reach_it_until_it_is_interrupted():
    command = [sys.executable, "-m", "gradwire", "rendezvous", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().split("port ")[1].split()[0])
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            store.set("here", "1")
            assert store.get("here") == b"1"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_port_that_is_none_is_refused():
    with pytest.raises(ValueError, match="from 0 to 65535"):
        RendezvousConfig(port=-1)
