"""Bytes that move between memory and processor, counted where kernels load and store in Triton's interpreter.

Of a large tensor each load and store counts. What is small stays in a cache while a kernel runs, so each byte of it counts
once a launch. Of torch's operators what they read and what they write counts, by index only what the indices say.
"""

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 17  # bytes of a tensor
ONLY_WRITTEN = ("copy_", "zero_", "fill_")
NOTHING_MOVES = ("empty", "new_empty", "empty_like", "empty_strided")


class Counted(TorchDispatchMode):
    """Counts inside a `with`, in bytes: of kernels in `by_kernel`, by their names, of torch's operators in `by_operator`."""

    def __init__(self, monkeypatch):
        super().__init__()
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        self.by_kernel, self.by_operator = {}, {}
        self._counting = False
        self._launch = None  # while a kernel runs
        launch = GridExecutor.__call__
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_launch(executor, *args, **kwargs):
            if not self._counting:
                return launch(executor, *args, **kwargs)
            self._launch = Launch([each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)])
            try:
                return launch(executor, *args, **kwargs)
            finally:
                name = executor.fn.__name__
                self.by_kernel[name] = self.by_kernel.get(name, 0) + self._launch.bytes()
                self._launch = None

        def counted_load(builder, pointers, mask, *args, **kwargs):
            self._note("loads", pointers, mask)
            return load(builder, pointers, mask, *args, **kwargs)

        def counted_store(builder, pointers, value, mask, *args, **kwargs):
            self._note("stores", pointers, mask)
            return store(builder, pointers, value, mask, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", counted_launch)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)

    def __enter__(self):
        self._counting = True
        return super().__enter__()

    def __exit__(self, *args):
        self._counting = False
        return super().__exit__(*args)

    @property
    def bytes(self):
        """Of all kernels and operators."""
        return sum(self.by_kernel.values()) + sum(self.by_operator.values())

    def _note(self, kind, pointers, mask):
        if self._launch is not None:
            size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
            self._launch.note(kind, numpy.broadcast_arrays(pointers.data, mask.data), size)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """An operator runs; inside a launch, where the interpreter hands tensors over, it moves nothing."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._launch is None and (moved := moved_by(function, args, kwargs, result)):
            name = str(function)
            self.by_operator[name] = self.by_operator.get(name, 0) + moved
        return result


class Launch:
    """The accesses of one launch to its tensors."""

    def __init__(self, tensors):
        self._starts = numpy.array(sorted({tensor.data_ptr() for tensor in tensors}), dtype=numpy.uint64)
        spans = dict.fromkeys(self._starts.tolist(), 0)
        for tensor in tensors:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans[tensor.data_ptr()] = max(spans[tensor.data_ptr()], (last + 1) * tensor.element_size())
        self._large = numpy.array([spans[start] >= LARGE for start in self._starts.tolist()])
        self._moved = 0
        self._small = {}

    def note(self, kind, accesses, size):
        """Some accesses: where, and which of them take place."""
        addresses, taking_place = accesses
        addresses = addresses[taking_place.astype(bool)].astype(numpy.uint64)
        large = self._large[numpy.searchsorted(self._starts, addresses, side="right") - 1]
        self._moved += int(large.sum()) * size
        self._small.setdefault((kind, size), []).append(numpy.unique(addresses[~large]))

    def bytes(self):
        """Of all accesses so far."""
        small = sum(len(numpy.unique(numpy.concatenate(each))) * size for (_, size), each in self._small.items())
        return self._moved + small


def moved_by(function, args, kwargs, result):
    """What an operator reads and writes; nothing where its result is a view."""
    schema, name = function._schema, function._schema.name.split("::")[1]
    alias = [each.alias_info for each in schema.returns]
    if name in NOTHING_MOVES or any(each is not None and not each.is_write for each in alias):
        return 0
    given = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
    if name in ("index_select", "index_copy_"):
        part = given.get("source", result)
        return 2 * part.numel() * part.element_size() + given["index"].numel() * given["index"].element_size()
    moved = 0
    for argument in schema.arguments:
        tensors = [each for each in tree_leaves(given.get(argument.name)) if isinstance(each, torch.Tensor)]
        size = sum(each.numel() * each.element_size() for each in tensors)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written or argument.kwarg_only or name.removeprefix("_foreach_") in ONLY_WRITTEN:
            moved += size
        else:
            moved += 2 * size
    new = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)] if not any(alias) else []
    return moved + sum(each.numel() * each.element_size() for each in new)
