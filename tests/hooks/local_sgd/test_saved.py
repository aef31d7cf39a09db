"""What a state of local steps that an earlier version saved means."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.hooks.local_sgd.saved import load

EMPTY = {"steps": 8, "round": 2, "parameters": {}, "fragments": [], "buffers": torch.zeros(0)}


def taken(number, saved_with, here):
    """The steps of a state of a format, of a model without parameters, where a compressor is attached now."""
    saved = {**EMPTY, "gradwire_local_steps": number, "setup": f"every=4, compressor={saved_with!r}, 2 fragments"}
    rounds = SimpleNamespace(fragments=[], buffers=torch.zeros(0))
    return load(saved, f"every=4, compressor={here!r}, 2 fragments", rounds)[0]


def test_a_compressor_of_format_1_is_by_the_defaults_of_then():
    assert taken(1, "onebit:block=64", "onebit:block=64,feedback=1") == 8
    assert taken(1, "int4", "int4") == 8
    with pytest.raises(ValueError, match=r"saved with .*'onebit:feedback=1', .* here it is .*'onebit'"):
        taken(1, "onebit", "onebit")


def test_one_of_today_is_as_it_is_written_and_of_a_format_to_come_refused():
    assert taken(2, "onebit", "onebit") == 8
    with pytest.raises(ValueError, match="saved with"):
        taken(3, "onebit", "onebit")
