"""The compiled extension, and one that was built from other sources."""

import sys
from importlib import import_module
from types import ModuleType

import pytest

module = import_module("gradwire.kernels.native.operations")


def test_an_extension_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradwire.kernels.native._kernels", ModuleType("_kernels"))
    load = module.library.__wrapped__
    with pytest.raises(ImportError, match="another version of gradwire"):
        load()
    monkeypatch.setattr(module, "library", load)
    assert "reinstall gradwire" in module.probe()
