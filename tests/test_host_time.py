"""docs/benchmarks/host_time.py: the host's work for a bucket on a GPU, counted on one that does nothing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing._internal.distributed import fake_pg

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
REPLIES = getattr(fake_pg, "FakeProcessGroup", None)  # of older torchs it gives hooks none
pytestmark = [
    pytest.mark.timeout(330),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        not hasattr(getattr(REPLIES, "Options", object), "simulate_uniform_ranks"),
        reason="this torch's group that does nothing gives hooks no replies",
    ),
]
# Calls of functions, of Python and of C, for a bucket of 8 tensors; launches of Triton's kernels.
MOST = {
    "gradwire:none": (135, 0),
    "gradwire:bf16": (245, 0),
    "gradwire:int8": (550, 5),
    "gradwire:topk:ratio=0.01": (530, 14),
    "gradwire:powersgd:rank=4": (610, 8),
    "gradwire:onebit": (900, 17),
}


def rows_of(out, *arguments):
    """{case: its figures}, outside of Triton's interpreter."""
    left_out = ("TRITON_INTERPRET", "GRADWIRE_KERNELS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "host_time.py", *arguments, "--turns", "1", "--json", str(out)]
    subprocess.run(command, cwd=FOLDER, env=environment, check=True, timeout=300)
    return {each["case"]: each for each in json.loads(out.read_text())["cases"]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of(tmp_path_factory.mktemp("host") / "host.json", "torch:powersgd", *MOST)


@pytest.mark.parametrize("case", MOST)
def test_a_bucket_takes_the_host_so_many_calls_at_most(rows, case):
    calls, launches = MOST[case]
    assert rows[case]["calls"] <= calls
    assert rows[case]["launches"] <= launches


def test_powersgd_takes_the_host_four_times_the_calls_of_torchs_hook_at_most(rows):
    assert rows["gradwire:powersgd:rank=4"]["calls"] <= 4 * rows["torch:powersgd"]["calls"]


def test_the_gradients_of_a_module_take_as_many_launches_on_256_ranks_as_on_8(tmp_path):
    rows = rows_of(tmp_path / "shards.json", "--shards")
    for spec, launches in (("int8", 3), ("int4", 3), ("int4:residual_bits=8", 5)):
        few, *more = (rows[f"{spec} on {ranks} ranks"] for ranks in (8, 64, 256))
        for each in more:
            assert each["launches"] == few["launches"] <= launches
            assert each["calls"] <= few["calls"] + 8
