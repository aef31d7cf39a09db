// Tensors as Python hands them over, looked at without a call of Python each.
#pragma once

#include <pybind11/pybind11.h>

#include "level.hpp"

namespace gradwire {

// Memory of the CPU without gaps, in order.
struct Flat {
    char* data;
    int64_t numel;
    Format format;
};

// At load, once. Without DLPack's exchange API, which torch has since 2.10, nothing is recognized.
void learn_tensors();

// What a torch.Tensor, of no subclass, holds; false where that is something else, or cannot be told. Whether its numbers
// are to be negated when they are read is not told either: torch.Tensor.is_neg does.
bool look(pybind11::handle tensor, Flat& found);

}  // namespace gradwire
