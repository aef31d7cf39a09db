"""Which saved states of local steps are taken."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.hooks.local_sgd.inside import Inside
from gradwire.hooks.local_sgd.saved import FORMAT, load

EMPTY = {"training": "", "steps": 8, "round": 2, "parameters": {}, "fragments": [], "buffers": torch.zeros(0)}
EMPTY |= {"inside": [0, 1], "axis": {}, "unfrozen": {}}


def taken(number, setup):
    """The steps of a state of a format, of a model without parameters."""
    rounds = SimpleNamespace(fragments=[], buffers=torch.zeros(0), digest=lambda: 77, training="", round=0)
    state = {**EMPTY, "gradwire_local_steps": number, "setup": setup}
    steps, _, _ = load(state, "every=4", rounds, Inside(), fresh=True)
    assert rounds.lineage == 77  # sites that load different models find out
    return steps


def test_a_state_of_another_format_or_setup_is_refused():
    assert taken(FORMAT, "every=4") == 8
    for number in (FORMAT - 1, FORMAT + 1):
        with pytest.raises(ValueError, match="load it with the version of gradwire that wrote it"):
            taken(number, "every=4")
    with pytest.raises(ValueError, match="saved with every=8, here it is every=4"):
        taken(FORMAT, "every=8")
