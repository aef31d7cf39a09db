"""`gradwire compressors`: each compressor's own text, and its sentence on masked elements."""

import pytest
import torch

from gradwire.compress import Simulation, compressor, compressors
from gradwire.compress.protocol.registry import BASELINES
from gradwire.experiments.cli import main
from gradwire.testing import bucket

NAMES = [*compressors(), *BASELINES]
MASK_AVERAGES = "mask averages, not gradients"


def printed(capsys, *names):
    assert main(["compressors", *names]) == 0
    return " ".join(capsys.readouterr().out.split())


def moves_masked_elements(spec):
    """True if an element whose gradient a mask sets to zero on all ranks has an average, beside others of its row."""
    within, generator = bucket([(16, 24), (7,), (300,)]), torch.Generator().manual_seed(0)
    simulation, masked = Simulation(compressor(spec), within), torch.rand(within.numel, generator=generator) < 0.5
    given = [torch.randn(within.numel, generator=generator).masked_fill(masked, 0) for _ in range(2)]
    return any(bool(simulation.step([each.clone() for each in given])[0][masked].any()) for _ in range(3))


@pytest.mark.parametrize("name", NAMES)
def test_a_compressor_that_moves_masked_elements_says_where_to_mask(name, capsys):
    text = printed(capsys, name)
    specs = [f"{name}:min_compression_rate=0" if "min_compression_rate" in text else name]
    specs += [f"{name}:rotate=true"] * ("rotate=" in text)
    assert (MASK_AVERAGES in text) == any(map(moves_masked_elements, specs))


@pytest.mark.parametrize("name", compressors())
def test_the_text_of_a_compressor_has_its_options(name, capsys):
    text = printed(capsys, name)
    assert text.startswith(name)
    assert all(f"{option}=" in text for option in compressors()[name]["options"])


def test_without_a_name_each_compressor_has_a_line(capsys):
    assert main(["compressors"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES
