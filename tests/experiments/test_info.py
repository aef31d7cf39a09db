import json
import socket

import torch

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
