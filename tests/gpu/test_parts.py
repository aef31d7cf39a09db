"""The parts of `make gpu`, as far as that can be told without a GPU."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import torch

from . import __main__ as command
from .parts import BENCHMARKS, PARTS, ROOT, Part, busy_hosts, slow_kernels, slow_steps

COMMANDS_NEED = {"jsonargparse", "rich", "yaml", "matplotlib", "xdist", "pytest_timeout"}


@pytest.mark.parametrize("name", PARTS)
def test_commands_name_files_that_exist(name, tmp_path):
    words = PARTS[name].command(tmp_path)
    files = [word for word in words[1:] if word.endswith(".py") and " " not in word]
    assert all((ROOT / file).exists() for file in files)
    assert words[0] == sys.executable


def test_every_test_of_a_gpu_is_in_a_part(tmp_path):
    marked = {
        file
        for file in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^pytestmark = .*mark\.gpu", file.read_text(), re.MULTILINE)
    }
    in_parts = {ROOT / word for part in PARTS.values() for word in part.command(tmp_path) if word.endswith(".py")}
    here = Path(__file__)
    without_one = {here.with_name(f"test_{name}.py") for name in ("parts", "host_reads", "quality", "shared_card")}
    assert {*marked, *ROOT.glob("tests/gpu/test_*.py")} - in_parts == without_one


WITHOUT = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda _, name, *more: None if name.split(".")[0] in {missing} else find(name, *more))
sys.path[:0] = {paths}
{code}
"""
CODE = {
    "info": "from gradwire.experiments.info import collect; collect()",
    "floors": "from gradwire.experiments.kernels.command import KernelsConfig, kernels_command",
    "step": "import gpu_step; gpu_step.show([], 'gpu')",
    "host": "import gpu_step; gpu_step.show([], 'host')",
    "profile": "import gpu_profile",
    "graphs": "import gpu_graph",
    "quality": "import gpu_quality; gpu_quality.show([], 'quality')",
}


def ran_without(missing, code):
    """What a clone prints that is not installed, where some modules are not there either."""
    code = WITHOUT.format(missing={*missing}, paths=[str(ROOT), str(BENCHMARKS)], code=code)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "step")) for each in CODE])
def test_a_part_does_with_the_modules_that_it_names(name):
    if why := dataclasses.replace(PARTS[name], device=False).missing:
        pytest.skip(", ".join(why))
    ran_without(COMMANDS_NEED - {*PARTS[name].modules}, CODE[name])


FLOORS = """
from gradwire.experiments.kernels.command import KernelsConfig, kernels_command
settings = {"sizes": ["100k"], "repeats": 3, "seconds": 0, "threads": [1], "device": "cpu"}
raise SystemExit(kernels_command(KernelsConfig(["all_finite"], ["reference"], **settings)))
"""


def test_without_rich_floors_are_lines():
    told = ran_without({"rich"}, FLOORS).splitlines()
    assert re.match(r"100,000 elements, fp32, 1 thread: all_finite on reference: time [\d.]+ ms, ± ", told[0])
    assert "torch for all_finite: sum().isfinite()" in told


def others_than(*distributions):
    """The top-level modules of all that is installed but for these distributions and what they need."""
    needed = set()
    while distributions:
        name, *distributions = distributions
        if name not in needed:
            needed.add(name)
            with suppress(PackageNotFoundError):  # for another system
                required = [each for each in requires(name) or () if "extra ==" not in each]
                distributions += [canonical(re.match(r"[\w.-]+", each)[0]) for each in required]
    found = packages_distributions().items()
    return {name for name, owners in found if needed.isdisjoint(map(canonical, owners))} - {"gradwire", "tests"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


COLLECT = """
import pathlib, pytest
from tests.gpu.parts import PARTS
for part in PARTS.values():
    if "pytest" in part.modules:
        arguments = part.command(pathlib.Path())[3:]
        assert not pytest.main([*arguments, "tests/gpu/test_parts.py", "--collect-only"]), arguments
"""


def test_tests_are_found_where_little_more_than_torch_triton_and_pytest_is_installed():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton not installed")
    ran_without(others_than("torch", "triton", "numpy", "pytest"), COLLECT)


def part(code, **settings):
    return Part("a part", lambda out: [sys.executable, "-c", code], **{"device": False, **settings})


@pytest.mark.parametrize(
    ("made", "verdict", "word"),
    [
        (part("pass"), "passed", ""),
        (part("raise SystemExit(3)"), "failed", "exit code 3"),
        (part("pass", modules=("no_such_module",)), "left out", "no_such_module not installed"),
        (part("pass", device=True), "left out", "no CUDA device"),
        (part("pass", misses=lambda out: ["too slow"]), "short of its goal", "too slow"),
        (part("import time; time.sleep(60)"), "failed", "not done"),
    ],
    ids=["good", "failing", "without a module", "without a device", "slow", "endless"],
)
def test_every_part_gets_a_verdict(made, verdict, word, tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "made", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if word == "not done":
        monkeypatch.setattr(command, "LIMIT", 1)
    result = command.run("made", tmp_path)
    assert result["verdict"] == verdict
    assert word in " ".join(result["why"])


def runs(stat):
    """Whether a process does; it may go at any moment."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_part_has_started_ends_with_it(tmp_path, monkeypatch):
    """As workers of pytest's, which would hold the GPU during the next part."""
    start = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"
    monkeypatch.setattr(command, "LIMIT", 10)  # long enough for Python to start
    for code in (start, f"{start}; time.sleep(60)"):
        monkeypatch.setitem(PARTS, "made", part(code))
        command.run("made", tmp_path)
        child = Path("/proc", (tmp_path / "made.log").read_text().strip(), "stat")
        deadline = time.monotonic() + 60
        while runs(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_second_call_runs_what_did_not_end_at_this_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "commit", lambda: "a commit")
    count = part(f"open({str(tmp_path / 'count')!r}, 'a').write('+')")
    for _ in range(2):
        code, results = ran(monkeypatch, tmp_path, count, part("raise SystemExit(3)"))
        assert code == 1
        assert [(each["verdict"], each["commit"]) for each in results] == [
            ("passed", "a commit"),
            ("failed", "a commit"),
        ]
    assert (tmp_path / "count").read_text() == "+"
    monkeypatch.setattr(command, "commit", lambda: "another")
    ran(monkeypatch, tmp_path, count, part("pass"))
    assert (tmp_path / "count").read_text() == "++"


def ran(monkeypatch, tmp_path, *codes):
    """The exit code of parts that are there alone, and their results as written."""
    monkeypatch.setattr(command, "PARTS", {f"part {number}": code for number, code in enumerate(codes)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--out", str(tmp_path / "results")])
    code = command.main()
    return code, json.loads((tmp_path / "results" / "summary.json").read_text())


def test_without_a_gpu_what_needs_none_runs(monkeypatch, tmp_path, capsys):
    code, results = ran(monkeypatch, tmp_path, part("pass"), part("pass", device=True))
    assert code == 2
    assert [result["verdict"] for result in results] == ["passed", "left out"]
    assert "sees no CUDA device" in capsys.readouterr().err


def test_a_part_that_fails_is_told_by_the_exit_code(monkeypatch, tmp_path):
    assert ran(monkeypatch, tmp_path, part("raise SystemExit(3)"), part("pass"))[0] == 1


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
