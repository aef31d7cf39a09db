"""What the native kernels take from Python: counts, types, tensors of every kind, references, and the GIL."""

import sys
import threading
import time

import pytest
import torch

from gradwire.kernels import native

from .native_given import needs_native

pytestmark = needs_native
X = torch.arange(16.0)


class Marked(torch.Tensor):
    """A subclass, which C++ may not look into."""


def by_methods(tensor):
    """The same memory in a tensor that C++ has to ask, as it asks all tensors of a torch before 2.10."""
    return tensor.as_subclass(Marked)


@pytest.mark.parametrize(
    "kind", [torch.Tensor.detach, by_methods, torch.nn.Parameter], ids=["plain", "subclass", "parameter"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats_and_places_in_memory_are_those_of_the_tensor(kind, dtype):
    source, out = kind(X.to(dtype)[3:]), kind(torch.empty(20, dtype=dtype)[7:])
    native.library().cast_scaled(source, out, 13, 2.0, None, 1)
    assert torch.equal(out.detach(), X[3:].to(dtype) * 2)
    assert native.library().all_finite(source, 13, 1) is True
    assert native.library().all_finite(kind(torch.tensor([1.0, torch.nan], dtype=dtype)), 2, 1) is False


@pytest.mark.parametrize("kind", [torch.Tensor.detach, by_methods], ids=["plain", "subclass"])
@pytest.mark.parametrize("long", [torch.int32, torch.int64], ids=str)
def test_gaps_between_rows_are_skipped(kind, long):
    indices = torch.tensor([[[0, 1, 9], [0, 3, 9]], [[2, 1, 9], [1, 0, 9]]], dtype=long)
    values, found, expected = torch.arange(20.0).view(2, 2, 5), torch.empty(8), torch.empty(8)
    for out, first, second in (
        (found, indices[..., :2], values[..., :2]),
        (expected, indices[..., :2].clone(), values[..., :2].clone()),
    ):
        native.library().scatter_mean(kind(first), kind(second), kind(out), 2, 2, 2, 8, 4, 1)
    assert found.tolist() == expected.tolist() == [0.0, 6.0, 5.0, 0.0, 10.5, 7.5, 0.0, 3.0]


def test_none_is_no_memory_and_nothing_is_read_of_nothing():
    assert native.library().all_finite(None, 0, 1)
    assert native.library().all_finite(torch.empty(0), 0, 1)


def test_places_may_be_any_sequence():
    out = torch.empty(4)
    left = native.library().gather_scaled(out, (X[4:6], X[8:10]), range(0, 4, 2), 1.0, 1)
    assert left == [] or left == [0, 1]  # a torch before 2.10 shows no tensors
    assert left or out.tolist() == [4.0, 5.0, 8.0, 9.0]


def call(name, arguments, error):
    try:
        getattr(native.library(), name)(*arguments)
    except TypeError:
        assert error
    else:
        assert not error


@pytest.mark.parametrize("threads", [1, "one"])
def test_no_call_keeps_or_loses_a_reference(threads):
    out, sources = torch.empty(2008), [X[:8].clone(), by_methods(X[8:].clone())]
    places, scale = [int("1000"), int("2000")], float("0.5")
    things = [out, sources, *sources, places, *places, scale, native.library(), native.library().cast_scaled]
    before = [sys.getrefcount(each) for each in things]
    for _ in range(100):
        call("gather_scaled", (out, sources, places, scale, threads), error=threads == "one")
        for source in sources:
            call("cast_scaled", (source, out, 8, scale, None, threads), error=threads == "one")
    del source
    assert [sys.getrefcount(each) for each in things] == before


@pytest.mark.parametrize("name", ["cast_scaled", "gather_scaled"])
def test_other_threads_run_meanwhile(name):
    source, out, go, ran = torch.ones(1 << 20), torch.empty(1 << 20), threading.Event(), []
    arguments = {"cast_scaled": (source, out, 1 << 20, 1.0, None, 1), "gather_scaled": (out, [source], [0], 1.0, 1)}[
        name
    ]
    if name == "gather_scaled" and native.library().gather_scaled(*arguments):
        pytest.skip("a torch before 2.10 shows no tensors")
    other = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    interval, deadline = sys.getswitchinterval(), time.monotonic() + 20
    other.start()
    sys.setswitchinterval(1000)  # seconds: who does not release the GIL keeps it
    try:
        go.set()
        while not ran and time.monotonic() < deadline:
            call(name, arguments, error=False)
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert ran
    assert time.monotonic() < deadline
