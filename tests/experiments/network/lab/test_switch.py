"""Delay, jitter and loss of links, as programs on the hosts see them."""

import json
import os
import statistics
import sys
import time

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.network.lab import switch
from gradwire.experiments.network.lab.hosts import left_by

SENT = 10**6
OPENING = """
import json, os, socket, sys, time
from pathlib import Path
place, ready, rank = (os.environ["MASTER_ADDR"], 5000), Path(sys.argv[1]), os.environ["RANK"]
socket.setdefaulttimeout(30)

def until_ready():
    while not ready.exists():
        time.sleep(0.01)
"""
# Host 1 asks host 0 ten times, writes down the shortest round trip, and sends. Host 0 prints the seconds of these bytes.
TRIPS = f"""{OPENING}
if rank == "0":
    with socket.create_server(place) as server:
        ready.touch()
        peer, _ = server.accept()
        for _ in range(10):
            peer.sendall(peer.recv(1))
        peer.recv(1)
        began = time.monotonic()
        while peer.recv(65536):
            pass
        print(json.dumps(time.monotonic() - began))
else:
    until_ready()
    peer, trips = socket.create_connection(place), []
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # BBR hardly minds loss
    for _ in range(10):
        began = time.monotonic()
        peer.sendall(b"?")
        peer.recv(1)
        trips.append(time.monotonic() - began)
    ready.write_text(json.dumps(min(trips)))
    peer.sendall(bytes({SENT}))
"""
# Host 0 prints the number of each datagram that comes from host 1, and the seconds that it took.
DATAGRAMS = f"""{OPENING}
peer, came = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
if rank == "0":
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    peer.bind(place)
    ready.touch()
    try:
        while True:
            number, sent = json.loads(peer.recv(4096))
            came.append((number, time.monotonic() - sent))
            peer.settimeout(1.0)
    except TimeoutError:
        print(json.dumps(came))
else:
    until_ready()
    for number in range(int(sys.argv[3]) if len(sys.argv) > 3 else 300):
        peer.sendto(json.dumps([number, time.monotonic()]).encode(), place)
        time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def run(possible, capfd, tmp_path):
    """Run a script on two hosts; what host 0 has printed, and what is in the file that both share."""

    def running(options, script, *arguments):
        file = tmp_path / "ready"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-S", "-c", script, str(file), *arguments]
        assert main(["netlab", "--hosts=2", *options.split(), "--", *command]) == 0
        return json.loads(capfd.readouterr().out), file.read_text()

    return running


@pytest.mark.slow
@pytest.mark.parametrize("rates", ["--rate 8mbit --down 80mbit", "--rate 80mbit --down 8mbit"], ids=["up", "down"])
def test_a_round_trip_takes_the_delay_four_times_and_bytes_take_the_rate_of_the_slower_direction(run, rates):
    seconds, trip = run(f"{rates} --delay 20ms", TRIPS)
    assert 0.08 <= json.loads(trip) < 0.16
    assert 8 * SENT / 8e6 * 0.8 < seconds < 8 * SENT / 8e6 * 4  # a queue passes a burst at once


def came(run):
    """The numbers of the datagrams of a run that came."""
    return [number for number, _ in run]


@pytest.mark.slow
def test_packets_keep_their_order_take_the_delay_and_a_part_of_the_jitter_and_the_same_get_lost_again(run):
    options = "--rate 110mbit --down 500mbit --delay 10ms --jitter 15ms --loss 10%"
    runs = [run(options, DATAGRAMS, "0.002")[0]]
    while len(runs) < 6 and (len(runs) < 2 or came(runs[-1]) != came(runs[-2])):
        # again: on a busy host, a repeated ARP request changes what gets lost
        runs.append(run(options, DATAGRAMS, "0.002")[0])
    assert came(runs[-1]) == came(runs[-2])
    numbers, seconds = zip(*runs[-1], strict=True)
    assert list(numbers) == sorted(numbers)
    assert 220 < len(numbers) < 266  # 243 of 300 are meant: each of two links passes 90 %
    assert 0.02 <= min(seconds) < statistics.median(seconds)
    assert 0.025 < statistics.median(seconds) < 1


def test_a_switch_that_breaks_ends_the_lab_and_says_why(possible, capfd, monkeypatch):
    def broken(*arguments):
        time.sleep(0.5)
        raise OSError("no such device")

    monkeypatch.setattr(switch, "_pass", broken)
    assert main(["netlab", "--hosts=2", "--delay=1ms", "--", "sleep", "60"]) == 2
    assert "the network of the lab broke: no such device. Start the command again" in capfd.readouterr().err
    assert left_by(os.getpid()) == []
