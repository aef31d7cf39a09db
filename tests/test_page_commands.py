"""Shell commands of pages: each runs here, or in the test that is named below, or the reason stands there why none runs it.

Those that run here are cheap. They run in the order of their page, in a folder of their own. tests/test_docs.py checks that
all `gradwire` commands are accepted, with their options.
"""

import re
import shlex
from itertools import zip_longest

import pytest

from gradwire.experiments.cli import main

from .test_docs import PAGES, blocks

PROGRAMS = re.findall(
    r"\w+", "export git gradwire hostname kubectl make mpirun openssl pip python sbatch scp srun sudo torchrun"
)
HERE = r"gradwire (info|plan|compressors|ready --model mlp --steps 2$)"
ELSEWHERE = {  # a test, and beginnings or all of the commands that it runs, with another address, port or size of model
    "tests/test_first_minutes.py": [
        r"torchrun --nproc-per-node 2 train.py$",
        r"torchrun --nnodes 2 --nproc-per-node 1 .* HOST:29400 train.py$",
        r"GLOO_SOCKET_IFNAME=lo torchrun",
        r"COMPRESSOR=\w+ torchrun",
        r"EPOCHS=\d+ ",
        r"torchrun --nnodes 2 .* -m gradwire advise --model",
        r"torchrun --nproc-per-node 8 -m gradwire advise --model",
    ],
    "tests/test_launchers_page.py": [
        r"export MASTER_ADDR=\$\(scontrol show hostnames",
        r"srun --nodes 2 --ntasks-per-node 1 python train.py",
        r"mpirun -n 2 --host",
    ],
    "tests/test_examples.py": [
        r"(python|torchrun --nproc-per-node 2) docs/examples/train_(lightning|accelerate|transformers|ray|dcp|dcp_fsdp).py$",
        r"torchrun --nproc-per-node 2 docs/examples/train_(finetune|gpt|gpt_fsdp).py ",
    ],
    "tests/hooks/local_sgd/test_example.py": [r"python docs/examples/train_sites.py", r"openssl "],
    "tests/test_plugin_page.py": [r"python -c 'import gradwire; print"],
    "tests/test_demo_bytes.py": [r"python docs/benchmarks/demo_bytes.py$"],
    "tests/experiments/sweep/test_studies.py": [r"gradwire sweep --config [\w-]+ --short$"],
    "tests/experiments/test_rendezvous.py": [r"gradwire rendezvous"],
    "tests/experiments/test_top.py": [r"gradwire top"],
    "tests/experiments/test_try_script.py": [r"gradwire try"],
    "tests/experiments/bench/test_diff.py": [r"gradwire diff"],
    "tests/experiments/network/lab/test_hosts.py": [r"gradwire netlab --clean$"],
    "tests/experiments/network/lab/test_launcher.py": [r"gradwire netlab --hosts 4 --rate 100mbit -- "],
    "tests/experiments/network/lab/test_switch.py": [
        r"gradwire netlab --hosts 4 --rate 110mbit --down 500mbit --delay "
    ],
}
SHORTENED = ("advise", "bench", "check", "collective", "compare", "kernels", "ready", "sweep")
NOT_RUN = {
    "it needs a cluster": [
        r"sbatch ",
        r"kubectl ",
        r"srun --nodes 2 --ntasks-per-node 8",
        r"export MASTER_ADDR=host0",
        r"mpirun -np 16",
    ],
    "it needs several hosts: another line of its page runs, with --nproc or --nnodes 2": [
        r"torchrun --nnodes 4 ",
        r"torchrun --nnodes 2 --nproc-per-node 8 ",
    ],
    "it starts eight ranks, one for each GPU": [r"torchrun --nproc-per-node 8 train.py$"],
    ".ci/run runs make test, and it takes minutes": [r"make (compare|test)\b"],
    "it installs, copies, or changes the host": [r"pip install", r"git clone", r"scp ", r"sudo ", r"export \w+=\S+"],
    "it tests a network that is not there": [r"hostname -I$", r"python -c 'import socket; "],
    "it adds a setting of torch to a command that runs": [
        r"torchrun .* --rdzv-conf join_timeout=60",
        r"TORCH_DISTRIBUTED_DEBUG=DETAIL ",
        r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun .* docs/examples/train_elastic.py$",
    ],
    "it measures for minutes; a shorter form runs in tests/experiments": [
        rf"(torchrun .* -m )?gradwire ({'|'.join(SHORTENED)})\b"
    ],
    "it makes figures of docs/benchmarks or docs/results again, for minutes to hours": [
        r"(python|torchrun --nproc-per-node 2) (docs/benchmarks/)?\w+\.py",
        r"(GRADWIRE_\w+=\w+ )?(gradwire netlab .* -- python|torchrun --nproc-per-node 2) (docs/benchmarks/)?\w+_times?\.py",
        r"(PYTHONPATH=\S+ )?python -m tests\.kernels\.",
        r"make gpu",
    ],
}
REASONS = {**ELSEWHERE, **NOT_RUN}
BY_SWEEPS = [page for page in PAGES if page.endswith("/README.md") and "\nThe study:\n" in PAGES[page]]


def shell(page):
    """(a command as it is printed, what is shown below it) of a page's blocks, in order; sbatch's script is none."""
    found = blocks(page)
    for block, following in zip_longest(found, found[1:]):
        text = block.text.replace("\\\n", " ")
        if block.language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                below = (
                    following and following.language == "text" and not PAGES[page][block.end : following.start].strip()
                )
                yield from ((each.strip(), shown or (following.text if below else "")) for each in line.split("; "))
        elif block.language in ("", "sh"):
            lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
            yield from ((line, "") for line in lines if program(line) in PROGRAMS)


def figures(text):
    """The words and numbers of a table, without its frame."""
    return re.findall(r"[\w.,:=+%-]+", text)


def program(line):
    """The first word of a command behind its variables."""
    return re.sub(r"^([A-Z_]+=\S* )+", "", line).partition(" ")[0]


COMMANDS = [(page, line) for page in PAGES if page not in BY_SWEEPS for line, _ in shell(page)]
CHEAP = sorted({page for page, line in COMMANDS if re.match(HERE, line)})


@pytest.mark.parametrize("page", CHEAP)
def test_the_cheap_commands_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for line, shown in shell(page):
        if re.match(HERE, line):
            assert main(shlex.split(line)[1:]) == 0, line
            printed = capsys.readouterr().out
            assert not shown.strip() or figures(printed) == figures(shown)


def places(line):
    """The tests that run a command, or the reasons why none does."""
    return [place for place, patterns in REASONS.items() if any(re.match(pattern, line) for pattern in patterns)]


def test_every_command_of_a_page_runs_or_has_a_reason():
    assert [(page, line) for page, line in COMMANDS if not re.match(HERE, line) and not places(line)] == []
