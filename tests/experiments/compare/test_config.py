import pytest

from gradwire.experiments.compare.config import CompareConfig


def test_the_python_configuration_is_checked_too():
    with pytest.raises(ValueError, match="unknown compressor 'nope'"):
        CompareConfig(compressors=["nope"])
