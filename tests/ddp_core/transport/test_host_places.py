"""The GPUs that NVLink joins: as nvidia-smi prints them, for boxes of several kinds."""

import subprocess

import pytest
import torch

from gradwire.ddp_core.transport import host_places
from gradwire.ddp_core.transport.host_places import connections, island, island_of, matrix, of_each

# Four cards in two pairs that bridges join, and a network card; the head is underlined, as nvidia-smi prints it.
PAIRS = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tSYS\t0-15\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV4\tPHB\t16-31\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tPHB\t16-31\t1\t\tN/A
NIC0\tSYS\tSYS\tPHB\tPHB\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def box(size, kind):
    head = "\t".join(f"GPU{index}" for index in range(size))
    rows = ("\t".join("X" if a == b else kind(a, b) for b in range(size)) for a in range(size))
    return "\n".join([f"\t{head}\tCPU Affinity", *(f"GPU{index}\t{row}\t0-15" for index, row in enumerate(rows))])


BOXES = {
    "no NVLink": (box(8, lambda a, b: "PHB" if a // 4 == b // 4 else "SYS"), 1),
    "a switch of NVLink": (box(8, lambda a, b: "NV18"), 8),
    "bridges between pairs": (PAIRS, 2),
    "a ring of NVLink": (box(8, lambda a, b: "NV1" if (a - b) % 8 in (1, 7) else "PIX"), 8),
    "one card": (box(1, str), 1),
}


@pytest.mark.parametrize(("text", "each"), BOXES.values(), ids=BOXES)
def test_ranks_on_one_host_are_divided_by_islands(text, each):
    uuids = [f"GPU-{index}" for index in range(text.count("\nGPU"))]
    kinds = matrix(text, uuids)
    islands = [island(uuid, kinds) for uuid in uuids]
    assert of_each(["here"] * len(uuids), islands) == each


def test_on_several_hosts_it_is_the_network_card_that_divides():
    assert of_each(["a"] * 4 + ["b"] * 4, ["x", "x", "y", "y"] * 2) == 4


def test_where_nothing_is_known_of_nvlink_a_host_is_one_island():
    assert of_each(["a"] * 4, ["x", "x", "y", ""]) == of_each(["a"] * 4, [""] * 4) == 4


@pytest.mark.parametrize(("islands", "words"), [("xxxy", "different numbers of ranks: "), ("xyxy", "do not follow")])
def test_islands_that_differ_or_are_not_consecutive_are_refused_with_the_way_out(islands, words):
    with pytest.raises(ValueError, match=rf"islands of NVLink .*{words}.*hosts:ranks=2\+"):
        of_each(["a"] * 4, islands)


@pytest.mark.parametrize(
    "answer", [OSError("no such file"), subprocess.TimeoutExpired("nvidia-smi", 20), "GPU0\t X \t0-15"]
)
def test_an_nvidia_smi_that_is_missing_hangs_or_says_something_else_tells_nothing(monkeypatch, answer):
    def asked(*arguments):
        if isinstance(answer, Exception):
            raise answer
        return "GPU-a GPU-b" if "--query-gpu=uuid" in arguments else answer

    monkeypatch.setattr(host_places, "_asked", asked)
    connections.cache_clear()
    assert connections() == {}
    connections.cache_clear()


def test_a_rank_on_a_cpu_has_no_island():
    assert island_of(torch.device("cpu")) == ""
