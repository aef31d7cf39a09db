"""The parts of `make gpu`, as far as that can be told without a GPU."""

import json
import sys
from pathlib import Path

import pytest

from . import __main__ as command
from .parts import PARTS, ROOT, Part, busy_hosts, slow_kernels, slow_steps


@pytest.mark.parametrize("name", PARTS)
def test_commands_name_files_that_exist(name, tmp_path):
    words = PARTS[name].command(tmp_path)
    files = [word for word in words[1:] if word.endswith(".py") and " " not in word]
    assert all((ROOT / file).exists() for file in files)
    assert words[0] == sys.executable


def part(code, **settings):
    return Part("a part", lambda out: [sys.executable, "-c", code], **settings)


@pytest.mark.parametrize(
    ("made", "verdict", "word"),
    [
        (part("pass"), "passed", ""),
        (part("raise SystemExit(3)"), "failed", "exit code 3"),
        (part("pass", modules=("no_such_module",)), "left out", "no_such_module not installed"),
        (part("pass", misses=lambda out: ["too slow"]), "short of its goal", "too slow"),
        (part("import time; time.sleep(60)"), "failed", "not done"),
    ],
    ids=["good", "failing", "without a module", "slow", "endless"],
)
def test_every_part_gets_a_verdict(made, verdict, word, tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "made", made)
    monkeypatch.setattr(command, "LIMIT", 2)
    result = command.run("made", tmp_path)
    assert result["verdict"] == verdict
    assert word in " ".join(result["why"])


def written(folder: Path, name, document):
    (folder / name).write_text(json.dumps(document))


def kernel(operation, seconds, fraction, elements=64_000_000):
    return {
        "operation": operation,
        "elements": elements,
        "seconds": seconds,
        "fraction_of_copy": fraction,
        "baseline_seconds": 1.0,
    }


def test_kernels_are_judged_by_their_fastest_backend_on_large_buckets(tmp_path):
    rows = [
        kernel("cast", 0.1, 0.9),
        kernel("cast", 0.5, 0.2),
        kernel("scatter", 0.3, 0.3),
        kernel("scatter", 0.3, 0.1, elements=1000),
        kernel("select_largest", 0.2, 0.86),
        kernel("orthogonalize:rank=4", 0.1, 0.01),
    ]
    written(tmp_path, "kernels.json", {"rows": rows})
    missed = slow_kernels(tmp_path)
    assert len(missed) == 2
    assert missed[0].startswith("scatter of 64,000,000: 0.30")
    assert "5.0x torch" in missed[1]


def step(case, times, extra):
    return {"case": f"{case}@25", "times_the_first": times, "extra_a_bucket_s": extra}


def test_steps_are_judged_by_their_overhead_and_hosts_by_their_time_a_bucket(tmp_path):
    rows = [step("torch:none", 1.0, None), step("gradwire:none", 1.005, 1e-4), step("gradwire:bf16", 1.02, 2e-4)]
    for bound in ("gpu", "host"):
        written(tmp_path, f"step-{bound}.json", {"cases": rows})
    assert slow_steps(tmp_path) == ["gradwire:bf16: 1.020x of torch's step, goal 1.01"]
    assert busy_hosts(tmp_path) == ["gradwire:bf16: 0.20 ms of the host a bucket, goal 0.15"]
