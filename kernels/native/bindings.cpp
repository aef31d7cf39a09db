// The operations for Python: addresses and sizes come in as integers, checked by the caller; the GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "operations.hpp"

namespace py = pybind11;

namespace gradwire {

namespace {

template <class Pointer>
Pointer at(uintptr_t address) {
    return reinterpret_cast<Pointer>(address);
}

using Strides = std::pair<int64_t, int64_t>;

void bind_streaming(py::module_& module) {
    module.def(
        "cast_scaled",
        [](uintptr_t source, int from, uintptr_t out, int to, int64_t numel, double scale, int64_t threads) {
            cast_scaled(at<const void*>(source), Format(from), at<void*>(out), Format(to), numel,
                        static_cast<float>(scale), threads);
        },
        py::call_guard<py::gil_scoped_release>());
    module.def(
        "sign_pack",
        [](uintptr_t grad, int format, uintptr_t residual, uintptr_t scales, int64_t scale_stride, uintptr_t bits,
           int64_t bit_stride, int64_t numel, int64_t rows, int64_t blocks, int64_t block, int64_t threads) {
            sign_pack({at<const void*>(grad), Format(format), at<float*>(residual), at<float*>(scales), scale_stride,
                       at<uint8_t*>(bits), bit_stride, numel, blocks, block},
                      rows, threads);
        },
        py::call_guard<py::gil_scoped_release>());
    module.def(
        "sign_unpack_mean",
        [](uintptr_t scales, Strides scale_strides, uintptr_t bits, Strides bit_strides, uintptr_t out, int format,
           int64_t voters, int64_t numel, int64_t blocks, int64_t block, int64_t threads) {
            sign_unpack_mean({at<const float*>(scales), scale_strides.first, scale_strides.second,
                              at<const uint8_t*>(bits), bit_strides.first, bit_strides.second, at<void*>(out),
                              Format(format), voters, numel, blocks, block},
                             threads);
        },
        py::call_guard<py::gil_scoped_release>());
}

void bind_selection(py::module_& module) {
    module.def(
        "select_largest",
        [](uintptr_t grad, int format, uintptr_t residual, uintptr_t indices, bool long_indices, int64_t index_stride,
           uintptr_t values, int value_format, int64_t value_stride, int64_t numel, int64_t length, int64_t rows,
           int64_t k, int64_t threads) {
            select_largest({at<const void*>(grad), Format(format), at<float*>(residual), at<void*>(indices),
                            long_indices, index_stride, at<void*>(values), Format(value_format), value_stride, numel,
                            length, rows, k},
                           threads);
        },
        py::call_guard<py::gil_scoped_release>());
    module.def(
        "scatter_mean",
        [](uintptr_t indices, bool long_indices, Strides index_strides, uintptr_t values, int value_format,
           Strides value_strides, uintptr_t out, int64_t voters, int64_t rows, int64_t k, int64_t numel, int64_t length,
           int64_t threads) {
            scatter_mean({at<const void*>(indices), long_indices, index_strides.first, index_strides.second,
                          at<const void*>(values), Format(value_format), value_strides.first, value_strides.second,
                          at<float*>(out), voters, rows, k, numel, length},
                         threads);
        },
        py::call_guard<py::gil_scoped_release>());
}

void bind_low_rank(py::module_& module) {
    const auto bind = [&](const char* name, void (*operation)(const LowRankBuffers&, int64_t)) {
        module.def(
            name,
            [operation](uintptr_t matrices, int64_t count, uintptr_t grad, uintptr_t residual, uintptr_t p, uintptr_t q,
                        int64_t threads) {
                operation({at<const Matrix*>(matrices), count, at<float*>(grad), at<float*>(residual), at<float*>(p),
                           at<float*>(q)},
                          threads);
            },
            py::call_guard<py::gil_scoped_release>());
    };
    bind("low_rank_left", low_rank_left);
    bind("low_rank_right", low_rank_right);
    bind("low_rank_finish", low_rank_finish);
}

}  // namespace

}  // namespace gradwire

PYBIND11_MODULE(_native, module) {
    module.doc() = "The inner loops of gradwire's kernels on CPUs.";
    module.def("levels", [] {
        std::vector<std::string> names;
        for (const gradwire::Level* each : gradwire::levels()) names.emplace_back(each->name);
        return names;
    });
    module.def("level", [] { return gradwire::level().name; });
    module.def("choose_level", &gradwire::choose_level);
    gradwire::bind_streaming(module);
    gradwire::bind_selection(module);
    gradwire::bind_low_rank(module);
}
