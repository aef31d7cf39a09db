import json
import socket
from types import SimpleNamespace

import torch

from gradwire.experiments import info as info_module
from gradwire.experiments.cli import main
from gradwire.experiments.info import collect


def test_json_tells_versions_devices_and_backends(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert told["cpu"]["cores"] >= told["cpu"]["usable"] >= 1
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert {"name": "reference", "device": "any", "available": True, "reason": ""} in told["kernels"]
    assert told["process_groups"]["gloo"] == torch.distributed.is_gloo_available()


def test_every_interface_is_listed_with_its_addresses():
    interfaces = {each["name"]: each for each in collect()["interfaces"]}
    assert set(interfaces) == {name for _, name in socket.if_nameindex()}
    loopback = [each for each in interfaces.values() if "127.0.0.1" in each["addresses"]]
    assert len(loopback) == 1
    assert all(each["speed_mbit"] is None or each["speed_mbit"] > 0 for each in interfaces.values())


def test_pairs_of_gpus_are_shown_by_connection_and_by_the_way_of_their_bytes(capsys, monkeypatch):
    card = SimpleNamespace(name="RTX", total_memory=24 * 1024**3, major=8, minor=9)
    kinds = {"a": {"b": "PHB", "c": "SYS"}, "b": {"a": "PHB", "c": "SYS"}, "c": {"a": "SYS", "b": "SYS"}}
    monkeypatch.setattr(info_module, "connections", lambda: kinds)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one, other))
    assert main(["info"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for row in (
        "PHB 1 pair PCIe, by way",
        "SYS 2 pairs by way",
        "bytes 1 pair direct",
        "bytes 2 pairs through host memory",
    ):
        assert any(row in line.replace("│ ", "") for line in shown), shown
