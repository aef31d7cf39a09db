"""Which implementation of an operation runs."""

import logging
import threading

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import dispatch
from gradwire.kernels.contract import log_unknown

CPU, DOUBLE = torch.zeros(1), torch.zeros(1).double()


@pytest.fixture(autouse=True)
def private_registry(monkeypatch):
    """A registry with the reference alone, and no request from the environment."""
    monkeypatch.setattr(dispatch, "_backends", {"reference": dispatch._backends["reference"]})
    monkeypatch.setattr(dispatch, "_operations", {})
    monkeypatch.delenv("GRADWIRE_KERNELS", raising=False)
    dispatch._from_environment.cache_clear()
    dispatch._log_fallback.cache_clear()
    yield
    dispatch._from_environment.cache_clear()
    dispatch._log_fallback.cache_clear()


@pytest.fixture
def calls():
    return []


@pytest.fixture
def probe_operation(calls):
    """An operation that notes which backend ran it."""

    @kernels.operation
    def probe_operation(tensor, extra=None):
        calls.append("reference")

    return probe_operation


def add(name, operation, calls, device="cpu", reason="", knows=None, automatic=True, has=True):
    """`knows`: the only dtype that it knows. `has`: it has an implementation of the operation."""
    backend = kernels.register_backend(name, device, lambda: reason, automatic)
    if has:
        operation.implement(name, knows and {"tensor": (knows,)})(lambda tensor, extra=None: calls.append(name))
    return backend


GPU, NARROW, BY_HAND = {"device": "cuda"}, {"knows": torch.float32}, {"automatic": False}
MANY = {"first": NARROW, "gpu": GPU, "broken": {"reason": "no compiler was found"}, "partial": {"has": False}}
MANY |= {"asked for only": NARROW | BY_HAND, "second": {}}
THREE = {"first": NARROW, "second": {}, "third": NARROW}
TABLE = [  # what there is, what is requested, a tensor, and what runs
    ({}, (), CPU, "reference"),
    ({"gpu": GPU}, (), CPU, "reference"),
    ({"a": {}, "gpu": GPU}, ("gpu", "reference"), CPU, "reference"),
    (MANY, (), CPU, "first"),
    (MANY, (), DOUBLE, "second"),
    ({"first": NARROW, "second": NARROW}, (), DOUBLE, "reference"),
    (THREE, (), DOUBLE, "second"),
    (THREE, ("first",), DOUBLE, "reference"),
    (THREE, ("first", "reference", "second"), DOUBLE, "reference"),
    (THREE, ("first", "second"), DOUBLE, "second"),
    (THREE, ("first", "third", "first"), DOUBLE, "reference"),
    ({"by hand": BY_HAND}, (), CPU, "reference"),
    ({"by hand": BY_HAND}, ("by hand",), CPU, "by hand"),
]


@pytest.mark.parametrize(("backends", "requested", "tensor", "ran"), TABLE)
def test_the_first_backend_that_works_and_knows_its_arguments_runs(
    probe_operation, calls, backends, requested, tensor, ran
):
    for name, settings in backends.items():
        add(name, probe_operation, calls, **settings)
    with kernels.use_backend(*requested):
        for _ in range(2):
            probe_operation(tensor)
    assert calls == [ran, ran]


def test_a_tensor_of_another_dtype_is_chosen_for_anew_which_is_logged_once(probe_operation, calls, caplog):
    caplog.set_level(logging.INFO)
    log_unknown.cache_clear()
    add("narrow", probe_operation, calls, **NARROW)
    add("wide", probe_operation, calls)
    for tensor in (CPU, DOUBLE, CPU, DOUBLE):
        probe_operation(tensor)
    assert calls == ["narrow", "wide"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "narrow probe_operation does not know torch.float64, the backend wide runs"
    ]


@pytest.mark.parametrize(
    ("settings", "words"), [({"has": False}, r"asked.*'probe_operation' for cpu.*reference"), (GPU, "for cpu tensors")]
)
def test_a_requested_backend_without_the_operation_or_for_another_device_raises(
    probe_operation, calls, settings, words
):
    add("asked", probe_operation, calls, **settings)
    with kernels.use_backend("asked"), pytest.raises(RuntimeError, match=words):
        probe_operation(CPU)
    assert not calls


def test_what_was_chosen_holds_until_another_backend_is_added_or_requested(probe_operation, calls):
    probe_operation(CPU)
    add("late", probe_operation, calls)
    probe_operation(CPU)
    with kernels.use_backend("reference"):
        probe_operation(CPU)
        with kernels.use_backend("late", "reference"):
            probe_operation(CPU)
        probe_operation(CPU)
    probe_operation(CPU)
    assert calls == ["reference", "late", "reference", "late", "reference", "late"]


@pytest.mark.parametrize("others", [[], ["second"]])
def test_a_fallback_is_logged_once_with_its_reason_and_to_the_reference_is_a_warning(
    probe_operation, calls, caplog, others
):
    caplog.set_level(logging.INFO)
    for name, reason in (("broken", "no compiler was found"), *((name, "") for name in others)):
        add(name, probe_operation, calls, reason=reason)
    for _ in range(3):
        probe_operation(CPU)
    assert calls == [*others, "reference"][:1] * 3
    assert [record.levelno for record in caplog.records] == [logging.INFO if others else logging.WARNING]
    assert "broken" in caplog.text
    assert "no compiler was found" in caplog.text


def test_use_backend_ends_with_an_exception(probe_operation, calls):
    add("a", probe_operation, calls)
    with pytest.raises(KeyError), kernels.use_backend("reference"):
        raise KeyError
    probe_operation(CPU)
    assert calls == ["a"]


def test_the_environment_chooses_and_use_backend_overrides_it(probe_operation, calls, monkeypatch):
    add("a", probe_operation, calls)
    monkeypatch.setenv("GRADWIRE_KERNELS", " reference ")
    probe_operation(CPU)
    with kernels.use_backend("a"):
        probe_operation(CPU)
    monkeypatch.setenv("GRADWIRE_KERNELS", "a, reference")
    probe_operation(CPU)
    monkeypatch.setenv("GRADWIRE_KERNELS", "")
    probe_operation(CPU)
    assert calls == ["reference", "a", "a", "a"]


def test_an_unknown_request_names_what_exists(probe_operation, calls):
    add("a", probe_operation, calls)
    with pytest.raises(ValueError, match=r"'nativ'.*reference, a"), kernels.use_backend("nativ"):
        pass


@pytest.mark.parametrize("by", ["with", "environment"])
def test_a_requested_backend_that_does_not_work_raises_with_the_reason(probe_operation, calls, monkeypatch, by):
    add("broken", probe_operation, calls, reason="no compiler was found")
    with pytest.raises(RuntimeError, match="'broken' does not work here: no compiler was found"):  # noqa: PT012
        if by == "environment":
            monkeypatch.setenv("GRADWIRE_KERNELS", "broken")
            probe_operation(CPU)
        else:
            with kernels.use_backend("broken"):
                pass
    assert not calls


def test_on_the_meta_device_an_operation_that_returns_a_tensor_says_which():
    @kernels.operation
    def doubled(tensor):
        return tensor * 2

    doubled.on_meta(lambda tensor: torch.empty_like(tensor, dtype=torch.int32))
    assert doubled(torch.zeros(3, device="meta")).dtype == torch.int32
    assert doubled(torch.ones(1)).item() == 2.0


def test_use_backend_holds_on_other_threads(probe_operation, calls):
    add("a", probe_operation, calls)
    add("b", probe_operation, calls)
    with kernels.use_backend("b"):
        thread = threading.Thread(target=probe_operation, args=(CPU,))
        thread.start()
        thread.join()
    assert calls == ["b"]
