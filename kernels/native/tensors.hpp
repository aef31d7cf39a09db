// Tensors as Python hands them over, looked at without a call of Python each.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "level.hpp"

namespace gradwire {

// Memory of the CPU without gaps, in order.
struct Flat {
    char* data;
    int64_t numel;
    Format format;
};

// Any tensor whose last dimension has no gaps: its address, the format of its numbers where they are floats, whether they
// are integers of 64 bits, and the strides of its first two dimensions, but for the last. None is all zeros.
struct Array {
    uintptr_t address = 0;
    Format format = Format::float32;
    bool is_long = false;
    int64_t outer = 0, inner = 0;
};

template <class Element>
Element* at(const Array& array) {
    return reinterpret_cast<Element*>(array.address);
}

// An argument of a function for Python: see python_functions.hpp.
void convert(PyObject* tensor, Array& array);

// At load, once. Without DLPack's exchange API, which torch has since 2.10, nothing is recognized.
void learn_tensors();

// What a torch.Tensor, of no subclass, holds; false where that is something else, or cannot be told. Whether its numbers
// are to be negated when they are read is not told either: torch.Tensor.is_neg does.
bool look(PyObject* tensor, Flat& found);

}  // namespace gradwire
