"""`gradwire check`: right ranks pass, and each of five planted faults is found and named."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from unittest import mock

import pytest
import torch

from gradwire import DistributedDataParallel
from gradwire.compress import AllReduce, compressors
from gradwire.ddp_core.memory.bucket_memory import BucketMemory
from gradwire.ddp_core.transport.protocol import Decorated
from gradwire.experiments.bench.models import task
from gradwire.experiments.check import averages, command
from gradwire.experiments.check.averages import check_averages, check_resumed, check_swapped, odd_one
from gradwire.experiments.check.command import CheckConfig, run_rank, sentence, without_addresses
from gradwire.experiments.check.show import averages_table, heading, steps_table
from gradwire.experiments.cli import main

CPU, SPEC = torch.device("cpu"), "int4"
LIMIT = 280  # seconds that a launch may take
MINE = """
import torch
def build():
    model = torch.nn.Linear(64, 64)
    return model, {"x": torch.randn(8, 64)}, lambda model, batch: model(batch["x"]).square().mean()
"""


class Changed(Decorated):
    """A transport whose replies are changed."""

    def __init__(self, inner, change):
        super().__init__(inner)
        self._change = change

    def start(self, request, channel):
        pending = self.inner.start(request, channel)
        wait = pending.wait
        pending.wait = lambda timeout: self._change(request, wait(timeout))
        return pending


def with_replies(change):
    """A patch of the checks' DistributedDataParallel, whose transport changes replies."""

    def made(*given, **settings):
        return DistributedDataParallel(*given, transport=lambda inner: Changed(inner, change), **settings)

    return mock.patch.object(averages, "DistributedDataParallel", made)


def one_bit_more(request, reply):
    """The largest byte of a code or a scale changes in its last bit."""
    reply.view(-1).view(torch.uint8)[8] ^= 1
    return reply


def rounds_differently(rank, odd=1):
    return with_replies(one_bit_more) if rank == odd else contextlib.nullcontext()


def first_rank_rounds_differently(rank):
    return rounds_differently(rank, odd=0)


def wrong_divisor(rank):
    return with_replies(lambda request, reply: reply.mul_(2) if isinstance(request, AllReduce) else reply)


def wrong_divisor_of_one(rank):
    """Of p3, 513 elements of 115 thousand."""
    step = averages.Training.step

    def doubled(training, gradients):
        averaged = step(training, gradients)
        averaged["p3"] *= 2
        return averaged

    return mock.patch.object(averages.Training, "step", doubled)


def lost_on_one_rank(rank):
    return lost_residual(rank) if rank == 1 else contextlib.nullcontext()


def lost_residual(rank):
    end = BucketMemory.end_step

    def end_and_lose(memory, *given):
        ended = end(memory, *given)
        for leaf in memory.leaves.residuals:
            leaf.clear()
        return ended

    return mock.patch.object(BucketMemory, "end_step", end_and_lose)


def unequal_buckets(rank):
    return mock.patch.object(averages, "BUCKET_MB", 0.1 if rank == 0 else 0.3)


def unequal_buckets_behind_the_first(rank):
    def made(*given, bucket_cap_mb, **settings):
        sizes = [bucket_cap_mb, bucket_cap_mb if rank == 0 else 0.3]
        return DistributedDataParallel(*given, bucket_cap_mb_list=sizes, **settings)

    return mock.patch.object(averages, "DistributedDataParallel", made)


def dead_rank(rank):
    def die(request, reply):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    return with_replies(die)


def told(rank, world_size, fault, spec):
    """The sentence about a compressor on ranks with a fault; nothing where all is right."""
    with fault(rank):
        try:
            check_averages(spec, CPU)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("size", [2, 4])
def test_right_ranks_have_the_errors_of_the_simulation(ranks, size):
    assert ranks.run(right, size) == [True, *[False] * (size - 1)]


def right(rank, world_size):
    for spec in ("int4", "hosts:ranks=2+int4", "topk:ratio=0.01,error_feedback=0.9"):
        found = check_averages(spec, CPU)
        assert found is None or found[0].mean == pytest.approx(found[1].mean)
    check_resumed(CPU)
    check_swapped(CPU)
    return found is not None


FAULTS = [  # `{all}`: all ranks
    (rounds_differently, SPEC, "with int4, rank 1 rounds differently"),
    (wrong_divisor, "none", "with none, averages are 2.00x as large as they should be: the divisor is wrong"),
    (
        wrong_divisor_of_one,
        "none",
        "the divisor of some parameters is wrong: parts of the exact mean that they have and should have: p3 2.00 and 1.00",
    ),
    (wrong_divisor_of_one, SPEC, "with int4, the divisor of some parameters is wrong: "),
    (lost_residual, SPEC, "with int4, residuals are lost on ranks {all}: the mean of 8 averages is "),
    (lost_on_one_rank, SPEC, "with int4, residuals are lost on rank 1: the mean of 8 averages is "),
    (lost_on_one_rank, "topk:ratio=0.1", "residuals are lost on rank 1: the mean of 8 averages is "),
    (unequal_buckets, SPEC, "rank 0 has buckets of [104857] bytes, while rank 1 has buckets of [314572] bytes"),
    (unequal_buckets_behind_the_first, SPEC, "while rank 1 has buckets of [104857, 314572] bytes"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("fault", "spec", "words"), FAULTS, ids=[f"{fault.__name__} {spec}" for fault, spec, _ in FAULTS]
)
def test_a_planted_fault_is_named_on_all_ranks(ranks, size, fault, spec, words):
    for sentence_of_rank in ranks.run(told, size, fault, spec):
        assert words.replace("{all}", ", ".join(map(str, range(size)))) in sentence_of_rank


def test_most_ranks_decide_which_one_rounds_differently(ranks):
    words = "with int4, rank 0 rounds differently: its averages have other bits than those of rank 1"
    assert ranks.run(told, 4, first_rank_rounds_differently, SPEC) == [words] * 4


def checked_with_a_dead_rank(rank, world_size):
    with dead_rank(rank):
        check_averages(SPEC, CPU)


@pytest.mark.parametrize("size", [2, 4])
def test_a_dead_rank_is_named(ranks, size):
    first, dead, *others = ranks.run(checked_with_a_dead_rank, size, expect_errors=True)
    assert all("rank 1 " in alive.message for alive in (first, *others))
    assert "died" in dead.fate


def ran(tmp_path, code, text):
    """The exit code of a check of a user's own model on two ranks."""
    script, figures = tmp_path / "mine.py", tmp_path / "f.json"
    script.write_text(text)
    flags = ["--nproc=2", "--compressors=int4", "--steps=2", f"--model={script}:build", f"--json={figures}"]
    assert main(["check", *flags]) == code
    return json.loads(figures.read_text())


def test_a_check_shows_averages_and_steps_without_names_of_hosts_and_folders(tmp_path):
    document = ran(tmp_path, 0, MINE)
    tables = *averages_table(document["averages"]), *steps_table(document["rows"], "mine.py:build (9 parameters)", 2)
    shown = "\n".join([*heading(document), *tables])
    assert "mine.py:build (9 parameters), medians of 2 steps on all ranks:" in shown
    specs = ["none", "bf16", "int8", "int4", "hosts:ranks=2+bf16", "hosts:ranks=2+int8", "hosts:ranks=2+int4"]
    assert [row["compressor"] for row in document["rows"]] == specs
    assert [row["compressor"] for row in document["averages"]] == ["int4"]
    assert all(f"| {spec} |" in shown for spec in specs)
    for secret in (socket.gethostname(), str(tmp_path), "127.0.0.1"):
        assert secret not in shown + json.dumps(document)


KILLED = "import os, signal\nif os.environ['LOCAL_RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)"


def test_a_rank_that_is_killed_ends_the_check_with_one_sentence(tmp_path, capfd):
    document = ran(tmp_path, 1, f"{KILLED}\n{MINE}")
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == "NOT RIGHT: rank 1: process 1 terminated with signal SIGKILL"
    assert document["rows"] == []


def faulty_rank(rank, *given):
    with rounds_differently(rank):
        run_rank(rank, *given)


def test_a_wrong_result_ends_the_command_with_one_sentence(tmp_path, capfd):
    with mock.patch.object(command, "run_rank", faulty_rank):
        document = ran(tmp_path, 1, MINE)
    words = "with int4, rank 1 rounds differently: its averages have other bits than those of rank 0"
    assert capfd.readouterr().err.strip().splitlines()[-1].endswith(words)
    assert document["topology"]["ranks"] == 2
    assert document["rows"] == document["averages"] == []


def all_right(rank, world_size, specs):
    return [check_averages(spec, CPU) is not None for spec in specs]


def test_all_checks_the_averages_of_all_compressors(ranks):
    specs = CheckConfig(all=True).checked(2, 1)
    assert sorted(specs) == sorted([*(set(compressors()) - {"hosts"}), "hosts:ranks=2+int4"])
    assert ranks.run(all_right, 2, specs) == [[True] * len(specs), [False] * len(specs)]


@pytest.mark.parametrize(
    ("per_host", "hosts", "expected"), [(1, 2, []), (2, 1, ["2"]), (4, 1, ["4", "2"]), (3, 1, ["3"]), (4, 2, ["4"])]
)
def test_hosts_of_two_are_checked_where_one_host_has_all_ranks(per_host, hosts, expected):
    specs = [each for each in CheckConfig().checked(per_host, hosts) if "hosts" in each]
    assert specs == [f"hosts:ranks={ranks}+int4" for ranks in expected]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("Read error [127.0.0.1]:1248: Connection reset", "Read error [address]: Connection reset"),
        ("cannot reach 10.0.0.7:29500.", "cannot reach [address]."),
        ("cannot reach fe80::1%eth0, or [::1]:80", "cannot reach [address], or [address]"),
        ("no route to (node7.example.org, 29500)", "no route to ([address], 29500)"),
        ("node7: no answer from node8:29500.", "[address]: no answer from [address]."),
        ("c10d::Work of gloo 2.15.0 after 0:30:00: rank 1", "c10d::Work of gloo 2.15.0 after 0:30:00: rank 1"),
    ],
)
def test_a_sentence_has_no_addresses(told, shown):
    assert without_addresses(told, {"node7", "node8"}) == shown


def test_a_launched_check_shows_neither_its_host_nor_that_of_rank_0_nor_others(capfd):
    def run(rank, rendezvous, config, backend, names):
        names.add("node8")
        raise RuntimeError(f"node7 and node8 and {socket.gethostname()} do not answer")

    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node7"}
    with mock.patch.dict(os.environ, variables | {"MASTER_PORT": "1"}), mock.patch.object(command, "run_rank", run):
        assert main(["check", "--backend=gloo"]) == 1
    assert capfd.readouterr().err.strip().endswith("NOT RIGHT: [address] and [address] and [address] do not answer")


def test_a_failure_is_told_by_its_last_line():
    failure = "rank 1:\nTraceback (most recent call last):\n  x\na.WrongResult: with int4, rank 1 rounds differently"
    assert sentence(failure) == "rank 1: with int4, rank 1 rounds differently"
    assert sentence(f"rank 0: process 0 terminated with signal SIGKILL\n\n{failure}").startswith("rank 0: process 0")


@pytest.mark.parametrize(
    ("text", "words"),
    [("def build(): return 1", "returns a module, a batch and a function"), ("", "has no function build")],
)
def test_a_model_of_a_file_is_refused_with_what_it_should_return(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        task(f"{tmp_path / 'mine.py'}:build", 224).build()


def test_the_command_of_the_readme_runs_under_torchrun(tmp_path, forked_python, unused_port):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["--compressors=none,int4", "--steps=2", "--model=mine.py:build", "--bucket-mb=25", "--json=f.json"]
    command, own = forked_python.torchrun("--nproc-per-node", "2", "-m", "gradwire", "check", *words)
    variables = os.environ | own | {"PET_MASTER_PORT": str(unused_port)}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 host, gloo on cpu" in done.stdout
    assert "\nAll is right." in done.stdout
    document = json.loads((tmp_path / "f.json").read_text())
    assert {row["bucket_mb"] for row in document["rows"]} == {25}


@pytest.mark.parametrize(
    ("digests", "odd"), [("aa", None), ("ab", (1, 0)), ("abb", (0, 1)), ("aaba", (2, 0)), ("abab", (1, 0))]
)
def test_the_odd_rank_is_the_first_one_that_differs_from_most_and_rank_0_decides_a_tie(digests, odd):
    assert odd_one(digests) == odd
