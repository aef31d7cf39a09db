from datetime import timedelta

import pytest

from gradwire.experiments.ranks.group import joined, rendezvous_in


@pytest.mark.parametrize("name", ["plain", "with a space", "per%20cent", "what?#;"])
def test_ranks_meet_in_a_folder_of_any_name(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    rendezvous = rendezvous_in(folder, rank=0, nproc=1)
    assert list(folder.iterdir())
    with joined("gloo", timedelta(seconds=30), rendezvous) as group:
        assert (group.rank(), group.size()) == (0, 1)
        assert rendezvous["store"].timeout == timedelta(seconds=30)
