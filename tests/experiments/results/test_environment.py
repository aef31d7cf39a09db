import json

from gradwire.experiments.results.environment import environment


def test_the_environment_is_this_machine_s():
    found = environment()
    assert found["cores"] >= 1
    assert isinstance(found["processor"], str)
    assert json.dumps(found)
