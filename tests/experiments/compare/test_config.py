import pytest

from gradwire.experiments.cli import COMMANDS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.compare.config import CompareConfig


def test_the_python_configuration_is_checked_too():
    with pytest.raises(ValueError, match="unknown compressor 'nope'"):
        CompareConfig(compressors=["nope"])


def test_the_default_compares_what_the_table_of_networks_recommends():
    for config in (CompareConfig(), configuration(COMMANDS["compare"], "gradwire compare", [])):
        assert {"none", "bf16", "int4", "powersgd:rank=8,payload=int8"} <= set(config.compressors)
