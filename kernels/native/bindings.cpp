// The operations for Python. Arguments are checked by the caller, but for those of `gather_scaled`. The GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>

#include "operations.hpp"
#include "tensors.hpp"

namespace py = pybind11;

namespace gradwire {

namespace {

Residual residual(const Array& before, const Array& after) { return {at<const float>(before), at<float>(after), false}; }

// Gathers the usual sources; returns the numbers of the others, or of all, with nothing done, where the places are wrong.
std::vector<size_t> gather_tensors(py::handle out, const std::vector<py::object>& sources,
                                   const std::vector<int64_t>& places, double scale, int64_t threads) {
    std::vector<size_t> all(sources.size()), others;
    std::iota(all.begin(), all.end(), size_t{0});
    Flat target, source;
    if (sources.size() != places.size() || !look(out, target)) return all;
    std::vector<Piece> pieces;
    pieces.reserve(sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
        if (look(sources[i], source) && source.format == target.format) {
            const bool last = i + 1 == sources.size() || places[i + 1] < places[i];
            const int64_t room = (last ? target.numel : places[i + 1]) - places[i];
            if (places[i] < 0 || source.numel > room) return all;
            pieces.push_back({source.data, target.data + places[i] * size_of(target.format), source.numel});
        } else {
            others.push_back(i);
        }
    }
    const py::gil_scoped_release released;
    gather_scaled(pieces, target.format, static_cast<float>(scale), threads);
    return others;
}

void bind_casting(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "cast_scaled",
        [](Array source, Array out, int64_t numel, double scale, int64_t threads) {
            cast_scaled({at<const void>(source), source.format, at<void>(out), out.format, static_cast<float>(scale),
                         streams(out.format, numel)},
                        numel, threads);
        },
        released);
    module.def("gather_scaled", &gather_tensors);
}

void bind_finite(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "all_finite",
        [](Array source, int64_t numel, int64_t threads) {
            return all_finite(at<const void>(source), source.format, numel, threads);
        },
        released);
}

void bind_signs(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "sign_pack",
        [](Array grad, Array before, Array after, Array scales, Array bits, int64_t numel, int64_t rows, int64_t blocks,
           int64_t block, int64_t threads) {
            sign_pack({at<const void>(grad), grad.format, residual(before, after), at<float>(scales), scales.outer,
                       at<uint8_t>(bits), bits.outer, numel, blocks, block},
                      rows, threads);
        },
        released);
    module.def(
        "sign_unpack_mean",
        [](Array scales, Array bits, Array out, int64_t voters, int64_t numel, int64_t blocks, int64_t block,
           int64_t threads) {
            sign_unpack_mean(
                {at<const float>(scales), scales.outer, scales.inner, at<const uint8_t>(bits), bits.outer,
                 bits.inner, at<void>(out), out.format, voters, numel, blocks, block, streams(out.format, numel)},
                threads);
        },
        released);
}

void bind_quantization(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "quantize_blocks",
        [](Array grad, Array before, Array after, Array scales, Array codes, int64_t numel, int64_t rows, int64_t blocks,
           int64_t block, int64_t bits, int64_t exponent, float steps, float limit, int64_t seed, int64_t counter,
           int64_t threads) {
            quantize_blocks({at<const void>(grad), grad.format, residual(before, after), at<float>(scales),
                             scales.outer, at<uint8_t>(codes), codes.outer, numel, blocks, block, bits, exponent, steps,
                             limit, seed >= 0, static_cast<uint64_t>(seed), static_cast<uint64_t>(counter)},
                            rows, threads);
        },
        released);
    module.def(
        "dequantize_mean",
        [](Array scales, Array codes, Array out, int64_t voters, int64_t numel, int64_t blocks, int64_t block,
           int64_t bits, int64_t exponent, int64_t threads) {
            dequantize_mean(
                {at<const float>(scales), scales.outer, scales.inner, at<const uint8_t>(codes), codes.outer,
                 codes.inner, at<void>(out), out.format, voters, numel, blocks, block, bits, exponent,
                 streams(out.format, numel)},
                threads);
        },
        released);
    module.def(
        "rotate_blocks",
        [](Array values, Array signs, int64_t numel, int64_t block, bool back, int64_t threads) {
            rotate_blocks({at<float>(values), at<const float>(signs), block, 1.0f, back}, numel, threads);
        },
        released);
}

void bind_selection(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "select_largest",
        [](Array grad, Array before, Array after, Array indices, Array values, int64_t numel, int64_t length,
           int64_t rows, int64_t k, int64_t threads) {
            select_largest(
                {at<const void>(grad), grad.format, residual(before, after), at<void>(indices), indices.is_long,
                 indices.outer, at<void>(values), values.format, values.outer, numel, length, rows, k},
                threads);
        },
        released);
    module.def(
        "scatter_mean",
        [](Array indices, Array values, Array out, int64_t voters, int64_t rows, int64_t k, int64_t numel,
           int64_t length, int64_t threads) {
            scatter_mean(
                {at<const void>(indices), indices.is_long, indices.outer, indices.inner, at<const void>(values),
                 values.format, values.outer, values.inner, at<float>(out), voters, rows, k, numel, length},
                threads);
        },
        released);
}

void bind_low_rank(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    const auto bind_product = [&](const char* name, void (*product)(LowRankBuffers, int64_t)) {
        module.def(
            name,
            [product](Array matrices, int64_t count, Array grad, Array before, Array after, Array p, Array q,
                      int64_t threads) {
                product({at<const Matrix>(matrices), count, at<void>(grad), grad.format, residual(before, after),
                         at<float>(p), at<float>(q)},
                        threads);
            },
            released);
    };
    bind_product("low_rank_left", low_rank_left);
    bind_product("low_rank_right", low_rank_right);
    bind_product("low_rank_finish", low_rank_finish);
}

void bind_bases(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> released;
    module.def(
        "orthogonalize",
        [](Array matrices, int64_t count, Array p, int64_t threads) {
            orthogonalize(at<const Matrix>(matrices), count, at<float>(p), threads);
        },
        released);
    module.def(
        "normalize",
        [](Array matrices, int64_t count, Array q, Array previous, int64_t threads) {
            normalize(at<const Matrix>(matrices), count, at<float>(q), at<const float>(previous), threads);
        },
        released);
}

}  // namespace

}  // namespace gradwire

PYBIND11_MODULE(_native, module) {
    module.doc() = "The inner loops of gradwire's kernels on CPUs.";
    gradwire::learn_tensors();
    module.attr("interface") = 2;  // library.py has it too
    module.def("levels", [] {
        std::vector<std::string> names;
        for (const gradwire::Level* each : gradwire::levels()) names.emplace_back(each->name);
        return names;
    });
    module.def("level", [] { return gradwire::level().name; });
    module.def("choose_level", &gradwire::choose_level);
    gradwire::bind_casting(module);
    gradwire::bind_finite(module);
    gradwire::bind_signs(module);
    gradwire::bind_quantization(module);
    gradwire::bind_selection(module);
    gradwire::bind_low_rank(module);
    gradwire::bind_bases(module);
}
