import sys

import pytest

from gradwire.experiments.network.lab import NetlabConfig, run_on_hosts
from gradwire.experiments.network.lab.utilization import Utilization

MEGABYTE = 10**6
SENT = 4 * MEGABYTE
# Host 1 sends to host 0 when that is ready, which tells how long it took.
TRANSFER = f"""
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        peer, _ = server.accept()
        began, received = time.perf_counter(), 0
        peer.sendall(b"go")
        while piece := peer.recv(65536):
            received += len(piece)
        print("received", received, time.perf_counter() - began)
else:
    for _ in range(1200):
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.recv(2)
    peer.sendall(bytes({SENT}))
"""


def fastest(seconds, sent):
    """Bytes a second, of those times of at least a tenth of a second that were looked at; in others the machine was busy."""
    looks = list(zip(seconds, sent, strict=True))
    pairs = [(begin, end) for place, begin in enumerate(looks) for end in looks[place:] if end[0] - begin[0] >= 0.1]
    return max((end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in pairs)


def test_a_link_carries_its_rate_and_its_use_is_written_down(possible, capfd, tmp_path):
    file = tmp_path / "use.json"
    assert run_on_hosts(NetlabConfig(2, "50mbit", utilization=str(file)), [sys.executable, "-S", "-c", TRANSFER]) == 0
    shown = capfd.readouterr().out.splitlines()
    word, received, seconds = shown[0].split()
    assert (word, int(received)) == ("received", SENT)
    assert 8 * SENT / float(seconds) < 1.2 * 50e6
    assert shown[1].startswith("utilization")
    assert (tmp_path / "use.png").exists()
    use = Utilization.read(file)
    assert (use.network, use.rate) == ("2 hosts at 50 Mbit/s", "50mbit")
    frames = use.links["1"]["sent_bytes"][-1]
    assert SENT < frames < 1.1 * SENT
    assert use.links["0"]["received_bytes"][-1] == pytest.approx(frames, rel=0.05)
    assert 8 * fastest(use.seconds, use.links["1"]["sent_bytes"]) > 0.6 * 50e6
    begin, end = use.busy(1)
    assert begin < end <= use.seconds[-1]
