import json

import pytest

from gradwire.experiments.workloads.emulation import load_trace

from .given import TRACE


def test_a_trace_survives_its_file(tmp_path):
    TRACE.write(tmp_path / "small.json")
    assert load_trace(str(tmp_path / "small.json")) == TRACE
    assert load_trace(f"{tmp_path / 'small.json'}@2").seconds == pytest.approx(2)
    layer = json.loads((tmp_path / "small.json").read_text())["layers"][1]
    assert layer["parameters"] == {"weight": [30, 20], "bias": [30]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, "batch_size .* at least 1, got 0"),
        ({"layers": []}, "has no parameters"),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
        ({"layers.0.forward_seconds": -1}, "forward_seconds of layer 'embedding' .* got -1"),
        ({"layers.0.backward_seconds": float("nan")}, "backward_seconds .* got nan"),
        ({"layers.0.parameters": {"weight": 3}}, "(Attribute|Type)Error"),
        ({"layers.0.parameters": {"weight": [3, 0]}}, r"shape of 'embedding.weight' .* got \[3, 0\]"),
        ({"layers.0.name": "blocks.0"}, "several layers called 'blocks.0'"),
        (
            {"layers.0.name": "blocks", "layers.0.parameters": {"0.bias": [3]}},
            "several parameters called 'blocks.0.bias'",
        ),
        ({"layers.0.name": "blocks", "layers.0.parameters": {"1": [3]}}, "'blocks.1' is a parameter and a module"),
    ],
    ids=str,
)
def test_a_bad_trace_is_refused_with_what_is_wrong(change, words, tmp_path):
    path = tmp_path / "bad.json"
    TRACE.write(path)
    document = json.loads(path.read_text())
    for key, value in change.items():
        *groups, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        place = document
        for group in groups:
            place = place[group]
        place[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"bad.json is no trace: .*{words}"):
        load_trace(str(path))
