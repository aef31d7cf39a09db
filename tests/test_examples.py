"""The scripts of docs/examples run as they say, and print what docs/frameworks.md shows."""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]
FOLDER = Path(__file__).parents[1] / "docs" / "examples"
NEEDS = {
    "lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "ray": "ray",
    "elastic": "torch",
    "dcp": "torch",
    "muon": "torch",
}
GPT, PRETRAINED = "--steps 2 --width 32 --layers 1 --heads 2", "--steps 2 --pretrain-steps 2 --width 32"
TASKS = {  # short runs of a real task: script, options, packages
    "a GPT with Muon": ("gpt", f"{GPT} --optimizer muon", ()),
    "FSDP2": ("gpt_fsdp", GPT, ()),
    "FSDP2 with Muon": ("gpt_fsdp", f"{GPT} --optimizer muon", ()),
    "LoRA": ("finetune", f"{PRETRAINED} --lora", ("transformers", "peft")),
    "full fine-tuning": ("finetune", PRETRAINED, ("transformers", "peft")),
}
PROGRAMS = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
SHOWN = r"32 (synchronized )?steps"


def command(script):
    """What the first line of the script says how to start it."""
    first = script.read_text("utf-8").splitlines()[0]
    program, *words = shlex.split(re.search(r": ((?:torchrun|python) .*)\.\"\"\"$", first)[1])
    return [*PROGRAMS[program], *words[:-1], str(script.with_name(words[-1]))]


def printed(words, folder):
    """What a command prints that is run in a folder."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(  # train_sites.py: tests/hooks/local_sgd/test_example.py
    "script",
    [
        each
        for each in sorted(FOLDER.glob("*.py"))
        if each.stem.removeprefix("train_") not in {"sites", "dcp_fsdp", *(script for script, *_ in TASKS.values())}
    ],
    ids=lambda script: script.stem,
)
def test_an_example_runs_as_it_says(script, tmp_path):
    needed = NEEDS[script.stem.removeprefix("train_")]
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed")
    assert re.search(SHOWN, printed(command(script), tmp_path))


@pytest.mark.parametrize(("script", "options", "packages"), TASKS.values(), ids=TASKS)
def test_an_example_of_a_real_task_prints_its_outcome(script, options, packages, tmp_path):
    for package in packages:
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    torchrun = [*PROGRAMS["torchrun"], "--nproc-per-node", "2"]
    words = [*torchrun, str(FOLDER / f"train_{script}.py"), *options.split(), "--compressor", "int4"]
    (line,) = [each for each in printed(words, tmp_path).splitlines() if each.startswith('{"')]
    run = json.loads(line)
    assert (run["compressor"], run["steps"], run["ranks"]) == ("int4", 2, 2)
    assert 1 < run["validation_loss"] < 2 * math.log(256)  # nats of a byte
    assert run["sent_bytes_per_step"] > 0


def test_a_training_that_was_stopped_goes_on_with_another_number_of_ranks(tmp_path):
    words = command(FOLDER / "train_dcp.py")
    printed([*words, "16"], tmp_path)
    words[words.index("--nproc-per-node") + 1] = "3"
    assert "32 steps, of which 16 in this life, on 3 ranks" in printed(words, tmp_path)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("flags", [(), ("--replicate",)])
def test_fsdp2_with_two_optimizers_resumes_to_the_bit(flags, tmp_path, monkeypatch):
    if flags and torch.__version__ < "2.10":
        pytest.skip(f"torch {torch.__version__} has no replicate() with modules of its own")
    monkeypatch.setenv("GRADWIRE_COMPRESSOR", "int4")  # whose residual is saved
    words = [*command(FOLDER / "train_dcp_fsdp.py"), *flags]
    whole = printed(words, tmp_path)
    for newest in ("000024", "000032"):
        shutil.rmtree(tmp_path / ("dcp-replicate" if flags else "dcp-fsdp") / newest)
    assert "32 steps, of which 32 in this life; parameters " in whole
    assert printed(words, tmp_path) == whole.replace("which 32", "which 16")


@pytest.mark.parametrize(("name", "kept"), [("dcp", "dcp-checkpoints"), ("elastic", "elastic-checkpoint.pt")])
def test_a_finished_training_that_is_started_again_says_so_and_how_to_start_over(name, kept, tmp_path):
    words = command(FOLDER / f"train_{name}.py")
    assert re.search(SHOWN, printed(words, tmp_path))
    assert printed(words, tmp_path) == f"already finished: delete {kept} to start over\n"


LATE = """
import os, runpy, sys
from pathlib import Path
import gradwire

def late(before):
    def call(*arguments, **options):
        mine = {sorted(os.sched_getaffinity(0))[0]}
        os.sched_setaffinity(0, mine)
        for task in Path("/proc/self/task").iterdir():
            if "pt_gloo" in (task / "comm").read_text():
                os.sched_setaffinity(int(task.name), mine)
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
        return before(*arguments, **options)
    return call

gradwire.Handle.scatter_state_dict = late(gradwire.Handle.scatter_state_dict)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no idle threads")
def test_a_rank_that_ends_right_after_a_collective_does_not_abort_where_threads_of_gloo_are_late(tmp_path):
    words = command(FOLDER / "train_dcp.py")
    printed(words, tmp_path)
    (tmp_path / "late.py").write_text(LATE, "utf-8")
    for _ in range(3):
        assert "already finished" in printed([*words[:-1], str(tmp_path / "late.py"), words[-1]], tmp_path)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="this torch has no replicate() of FSDP2")
@pytest.mark.parametrize("options", [[], ["--replicate"]])
def test_muon_trains_in_16_bits_on_shards_and_on_replicas(options, tmp_path):
    words = [*command(FOLDER / "train_muon.py"), "--steps", "4", *options]
    assert re.fullmatch(r"4 steps, loss \d\.\d\d, 1\.9x fewer bytes than 16 bits\n", printed(words, tmp_path))
