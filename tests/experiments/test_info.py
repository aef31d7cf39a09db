import json

import torch

from gradwire.experiments.cli import main


def test_json_tells_versions_devices_and_backends(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert told["cpu"]["cores"] >= told["cpu"]["usable"] >= 1
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert {"name": "reference", "device": "any", "available": True, "reason": ""} in told["kernels"]
    assert told["process_groups"]["gloo"] == torch.distributed.is_gloo_available()
