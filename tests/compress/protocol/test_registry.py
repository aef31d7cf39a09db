"""The table of methods by name."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradwire.compress import Dense, Gathered, TopK, algorithms, compressor, compressors, register
from gradwire.compress.feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from gradwire.compress.protocol import registry

NAMES = [name for name, method in compressors().items() if name != "hosts"]  # which needs another one


@pytest.fixture(autouse=True)
def private_registry(monkeypatch):
    monkeypatch.setattr(registry, "registered", registry.registered)
    before = dict(registry.registered)
    yield
    registry.registered.clear()
    registry.registered.update(before)


def made(name="Made", module=__name__):
    """A new frozen dataclass of options."""

    @dataclass(frozen=True)
    class Made(Dense):
        """A made-up method.

        More about it.
        """

        volume: int = 11

    Made.__qualname__ = Made.__name__ = name
    Made.__module__ = module
    return Made


@pytest.mark.parametrize("name", NAMES)
def test_the_listed_defaults_are_those_that_a_bare_name_gets(name):
    defaults = {option: default for option, default in compressors()[name]["options"].items() if option != "warmup"}
    assert compressor({"name": name, **defaults}) == compressor(name)


FILE = """
from dataclasses import dataclass

from gradwire.compress import Dense, register


@register("new", lossy=False)
@dataclass(frozen=True)
class New(Dense):
    '''A new compressor.'''
"""


def test_a_file_in_the_folder_is_enough_for_a_new_compressor(tmp_path, monkeypatch):
    (tmp_path / "new_compressor.py").write_text(FILE, "utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    exec(Path(algorithms.__file__).read_text("utf-8"), vars(algorithms))
    module = sys.modules.pop(f"{algorithms.__name__}.new_compressor")
    assert compressor("new") == module.New()


def test_a_registered_class_is_built_by_name_and_left_as_it_is():
    factory = made()
    assert register("made", lossy=False)(factory) is factory
    assert compressor("made:volume=3") == factory(volume=3)


def test_a_lossy_method_gets_error_feedback_and_wide_arithmetic():
    factory = register("made")(made())
    assert compressor("made") == ErrorFeedback(Float32Arithmetic(factory()))
    assert compressor("made:error_feedback=false") == Float32Arithmetic(factory())


def test_an_adapter_makes_a_codec_a_compressor():
    register("made", adapter=Gathered, lossy=False)(TopK)
    assert compressor("made:k=3") == Gathered(TopK(k=3))


def test_a_taken_name_is_refused_and_says_by_whom():
    register("made")(made("First"))
    with pytest.raises(ValueError, match=rf"'made' is taken by {__name__}\.First"):
        register("made")(made("Second"))
    assert compressors()["made"]["summary"] == "A made-up method."
    assert isinstance(compressor("made").inner.inner, registry.registered["made"].factory)


def test_a_class_of_the_same_name_from_elsewhere_does_not_replace_the_first():
    with pytest.raises(ValueError, match=r"'topk' is taken by gradwire\.compress\.algorithms\.topk\.TopK"):
        register("topk")(made("TopK", "somewhere.else"))
    assert registry.registered["topk"].factory is TopK


def test_the_same_class_may_be_registered_again_as_when_a_notebook_cell_runs_twice():
    register("made")(made())
    again = register("made", lossy=False)(made())
    assert type(compressor("made")) is again


def test_what_is_not_a_dataclass_is_refused():
    with pytest.raises(TypeError, match=r"@register\('made'\) needs a frozen dataclass .*Plain"):

        @register("made")
        class Plain:
            pass

    assert "made" not in registry.registered
