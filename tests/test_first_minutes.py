"""What a newcomer runs first: README's script and the complete training script, started as their pages say."""

import os
import re
import shlex
import subprocess

import pytest

from gradwire.experiments.cli import main

from .forked import Script
from .test_docs import FENCE, PAGES, python_blocks, script

pytestmark = pytest.mark.timeout(300)
WITH_TORCHRUN = ("ddp", "fsdp", "overlap", "concepts", "thrown-away-gradients")
LIMIT = 280  # seconds that a command may take


def environment_of(command, **variables):
    """The words of a page's command behind its variables, and the environment that it runs in."""
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return words, {**alone, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture
def forked(tmp_path, unused_port):
    """Runs a page's command on this folder's train.py as torchrun or Python would, by processes that have torch already."""

    def run(command, **variables):
        (program, *words), environment = environment_of(command, **variables)
        count = int(words[words.index("--nproc-per-node") + 1]) if program == "torchrun" else 1
        ranks = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
        text = (tmp_path / "train.py").read_text("utf-8")
        places = [{**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        places = places if program == "torchrun" else [{}]
        scripts = [Script(text, folder=tmp_path, variables={**environment, **place}) for place in places]
        ended = [script.end() for script in scripts]
        assert [each.code for each in ended] == [0] * count, ended
        return "".join(each.out for each in ended), "".join(each.errors for each in ended)

    return run


def saved(page, folder):
    """Write a page's Python as the train.py that its commands start."""
    (folder / "train.py").write_text(small(script(page)), "utf-8")
    return folder


def small(text):
    """A script with a narrower model than README's, which takes a minute where ranks share two cores."""
    return text.replace("1024", "128").replace("4096", "256")


def printed_commands(page, beginning):
    """The commands of a page's plain blocks that begin so, in order."""
    lines = [line for _, text in re.findall(FENCE, PAGES[page]) for line in text.splitlines()]
    return [line for line in lines if re.match(beginning, line)]


def test_the_readmes_script_compresses_from_the_first_step(tmp_path, forked):
    (command,) = printed_commands("README.md", "torchrun --nproc")
    saved("README.md", tmp_path)
    _, watched = forked(command)
    lines = [line for line in watched.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    ratios = [float(re.search(r"([\d.]+)x fewer bytes", line)[1]) for line in lines]
    assert min(ratios) > 3.5
    assert "warm-up" not in watched


def test_the_readmes_other_form_is_torchs_hook(tmp_path, forked):
    (form,) = re.findall(r"^```\n(ddp_model.register_comm_hook.*?)```$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    text = small(script("README.md")).replace('handle = gradwire.attach(ddp_model, "int8", optimizer=optimizer)', form)
    (tmp_path / "train.py").write_text(text, "utf-8")
    _, watched = forked("torchrun --nproc-per-node 2 train.py")
    assert len(re.findall(r"3\.\d+x fewer bytes", watched)) == 3


@pytest.mark.slow
def test_the_training_script_starts_resumes_and_says_when_it_is_finished(tmp_path, forked):
    saved("docs/training-script.md", tmp_path)
    (command,) = printed_commands("docs/training-script.md", "torchrun --nproc")
    started, again = (forked(command, EPOCHS="2")[0] for _ in range(2))
    assert re.search(
        r"epoch 2: .* validation loss \d\.\d+\n(?s:.*)8 steps, 8 of them here, 3\.\dx fewer bytes", started
    )
    assert "epoch 1:" not in again
    assert "epoch 2 is done: delete checkpoint.pt to start over" in again
    (resumed,) = printed_commands("docs/training-script.md", "EPOCHS=4 ")
    assert re.search(r"14 steps, ", forked(resumed)[0]), "another number of ranks"
    without = forked(command, EPOCHS="5", GRADWIRE_COMPRESSOR="none")[0]
    assert "epoch 5:" in without
    assert "<Handle: none" in without


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/training-script.md", "docs/two-hosts.md"])
def test_a_script_without_the_lines_that_the_recipe_deletes_is_torchs_and_loads_its_checkpoint(page, tmp_path, forked):
    (command,) = printed_commands("README.md", "torchrun --nproc")
    text = (saved(page, tmp_path) / "train.py").read_text("utf-8")
    forked(command, EPOCHS="1")
    torchs = "dist.init_process_group('gloo'); device = torch.device('cpu')"
    own = re.sub(r"^device = .*", torchs, text, flags=re.MULTILINE)
    bare = re.sub(r"^.*\b(gradwire|handle|compression)\b.*\n", "", own, flags=re.MULTILINE)
    (tmp_path / "train.py").write_text(bare, "utf-8")
    printed, _ = forked(command, EPOCHS="2")
    assert ("epoch 1:" in printed, "epoch 2:" in printed) == (False, page == "docs/training-script.md")


@pytest.mark.slow
def test_the_commands_that_find_out_whether_it_pays_run_in_one_folder_as_printed(tmp_path, forked):
    saved("docs/training-script.md", tmp_path)
    commands = printed_commands("docs/training-script.md", "EPOCHS=20 GRADWIRE")
    ratios = []
    for command in commands:
        printed, _ = forked(command)
        ratios.append(float(re.search(r"80 of them here, ([\d.]+)x fewer bytes", printed)[1]))
    assert [round(ratio) for ratio in ratios] == [1, 2, 4, 7]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_TORCHRUN)
def test_a_page_whose_script_takes_several_ranks_runs_on_two(page, tmp_path, forked):
    text = script(f"docs/{page}.md")
    check = "import torch.distributed as ranks_of_page\nassert ranks_of_page.get_world_size() == 2\n"
    text, count = re.subn(r"^.*gradwire\.init_process_group\(.*\n", rf"\g<0>{check}", text, count=1, flags=re.MULTILINE)
    assert count
    (tmp_path / "train.py").write_text(text)
    forked("torchrun --nproc-per-node 2 train.py")


@pytest.mark.parametrize(("given", "ratio"), [("int8", "3.8"), ("int8/int4", "4.5")])
def test_the_script_of_fsdp2_takes_one_compressor_or_two(given, ratio, tmp_path, forked):
    (first,) = [block.text for block, _ in python_blocks("docs/fsdp.md") if "GRADWIRE_COMPRESSOR" in block.text]
    (tmp_path / "train.py").write_text(first, "utf-8")
    printed, _ = forked(f"GRADWIRE_COMPRESSOR={given} torchrun --nproc-per-node 2 train.py")
    assert f"{ratio}x fewer bytes than FSDP2 sends" in printed


@pytest.mark.slow
def test_hybrid_sharding_compresses_between_hosts_and_a_second_start_resumes(tmp_path, forked):
    texts = [block.text for block, _ in python_blocks("docs/fsdp.md")]
    parts = ("attach", "replicas=", "mine.exists()")
    first, hybrid, save = (next(each for each in texts if part in each) for part in parts)
    hybrid = hybrid.replace('int(os.environ.get("LOCAL_WORLD_SIZE", 1))', "2")
    (tmp_path / "train.py").write_text(f"{first}{hybrid}{save}print(handle)\n", "utf-8")
    for steps in (11, 21):
        printed, _ = forked("torchrun --nproc-per-node 4 train.py")
        assert re.search(rf"replicas int8, rank 0 of 2, {steps} steps, 11 of them here, 3\.\dx fewer bytes", printed)


def on_two_hosts(commands, folder, port, python):
    """The output of commands of two hosts, which run at the same time on this one, at an address of its own."""
    started = []
    for command in commands:
        words, environment = environment_of(command.replace("HOST:29400", f"127.0.0.1:{port}"))
        assert words.pop(0) == "torchrun"
        words, of_torchrun = python.torchrun(*words)
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(words, cwd=folder, env=environment | of_torchrun, **told))
    ended = [host.communicate(timeout=LIMIT)[0] for host in started]
    assert [host.returncode for host in started] == [0] * len(started), ended
    return ended


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT)
def test_the_command_for_two_hosts_runs_on_two(tmp_path, unused_port, forked_python):
    saved("docs/two-hosts.md", tmp_path)
    printed = printed_commands("docs/two-hosts.md", "GRADWIRE_COMPRESSOR=")
    *others, command = [each for each in printed if "--nproc-per-node 1" in each]
    assert len({each.partition(" ")[2] for each in (command, *others)}) == 1  # none and bf16 differ in that alone
    output = "".join(on_two_hosts([command] * 2, tmp_path, unused_port, forked_python))
    assert re.findall(r"step 60 .* (\d)\.\d+x fewer bytes", output) == ["7"]


ADVISE = """
import runpy, sys
sys.argv = {!r}
runpy.run_module("gradwire", run_name="__main__")
"""
SMALL = [
    "--model=gpt",
    "--model.width=32",
    "--model.layers=1",
    "--compressors=int4",
    "--trial-seconds=1",
]  # seconds, not minutes


@pytest.mark.slow
def test_the_commands_that_advise_run_under_the_launch_of_two_hosts(tmp_path, forked):
    launched = [line.partition(" -m ") for line in printed_commands("docs/should-i-compress.md", "torchrun ")]
    assert launched[0][0] + " train.py" in printed_commands("README.md", "torchrun --nnodes")
    (arguments,) = {command for _, _, command in launched}
    (tmp_path / "train.py").write_text(ADVISE.format([*shlex.split(arguments), *SMALL]), "utf-8")
    printed, _ = forked("torchrun --nproc-per-node 2 train.py")
    assert "2 ranks, adamw; measured in" in printed
    assert "No verdict: all ranks share the CPUs of this host" in printed


def test_a_watch_with_a_folder_is_what_top_shows_as_printed(tmp_path, forked, monkeypatch, capsys):
    (line,) = printed_commands("docs/watch.md", r"handle\.watch\(every=100,")
    text = script("docs/watch.md").replace("handle.watch(every=10)", line).replace("range(21)", "range(121)")
    (tmp_path / "train.py").write_text(text, "utf-8")
    forked("python train.py")
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"`gradwire (top \S+ --once)`", PAGES["docs/watch.md"])
    assert main(shlex.split(command)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("powersgd, 1 ranks")
    assert re.search(r"^│ +0 │[^│]+│ +100 │", shown, re.MULTILINE)


def test_the_commands_for_two_hosts_are_the_readmes():
    (readme,) = printed_commands("README.md", "torchrun --nnodes")
    printed = printed_commands("docs/two-hosts.md", "GRADWIRE_COMPRESSOR=")
    assert readme in {command.split(" ", 1)[1] for command in printed}
