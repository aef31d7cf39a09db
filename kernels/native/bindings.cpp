// The operations for Python. Arguments are checked by the caller, but for those of `gather_scaled`. The GIL is released.
#include <numeric>

#include "operations.hpp"
#include "python_functions.hpp"
#include "tensors.hpp"

namespace gradwire::bindings {

namespace {

Residual residual(const Array& before, const Array& after) { return {at<const float>(before), at<float>(after), false}; }

void cast_scaled(Array source, Array out, int64_t numel, double scale, Array residual, int64_t threads) {
    gradwire::cast_scaled({at<const void>(source), source.format, at<void>(out), out.format, static_cast<float>(scale),
                           at<float>(residual), streams(out.format, numel)},
                          numel, threads);
}

// Gathers the usual sources; returns the numbers of the others, or of all, with nothing done, where the places are wrong.
std::vector<size_t> gather_scaled(const Object& out, const std::vector<Object>& sources,
                                  const std::vector<int64_t>& places, double scale, int64_t threads) {
    std::vector<size_t> all(sources.size()), others;
    std::iota(all.begin(), all.end(), size_t{0});
    Flat target, source;
    if (sources.size() != places.size() || !look(out.get(), target)) return all;
    std::vector<Piece> pieces;
    pieces.reserve(sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
        if (look(sources[i].get(), source) && source.format == target.format) {
            const bool last = i + 1 == sources.size() || places[i + 1] < places[i];
            const int64_t room = (last ? target.numel : places[i + 1]) - places[i];
            if (places[i] < 0 || source.numel > room) return all;
            pieces.push_back({source.data, target.data + places[i] * size_of(target.format), source.numel});
        } else {
            others.push_back(i);
        }
    }
    const WithoutGil released;
    gradwire::gather_scaled(pieces, target.format, static_cast<float>(scale), threads);
    return others;
}

bool all_finite(Array source, int64_t numel, int64_t threads) {
    return gradwire::all_finite(at<const void>(source), source.format, numel, threads);
}

void sign_pack(Array grad, Array before, Array after, Array scales, Array bits, int64_t numel, int64_t rows,
               int64_t blocks, int64_t block, Array table, int64_t period, int64_t stride, int64_t threads) {
    gradwire::sign_pack({at<const void>(grad), grad.format, residual(before, after), at<float>(scales), scales.outer,
                         at<uint8_t>(bits), bits.outer, numel, blocks, block, {at<const Span>(table), period, stride}},
                        rows, threads);
}

void sign_unpack_mean(Array scales, Array bits, Array out, Array residual, int64_t voters, int64_t numel, int64_t rows,
                      int64_t blocks, int64_t block, Array table, int64_t period, int64_t stride, int64_t threads) {
    gradwire::sign_unpack_mean({at<const float>(scales), scales.outer, scales.inner, at<const uint8_t>(bits), bits.outer,
                                bits.inner, at<void>(out), out.format, at<float>(residual), voters, numel, blocks,
                                block, {at<const Span>(table), period, stride}, streams(out.format, numel)},
                               rows, threads);
}

void quantize_blocks(Array grad, Array before, Array after, Array scales, Array codes, int64_t numel, int64_t rows,
                     int64_t blocks, int64_t block, Array table, int64_t period, int64_t stride, int64_t bits,
                     double steps, double limit, int64_t seed, int64_t counter, int64_t threads) {
    gradwire::quantize_blocks({at<const void>(grad), grad.format, residual(before, after), at<float>(scales),
                               scales.outer, at<uint8_t>(codes), codes.outer, numel, blocks, block,
                               {at<const Span>(table), period, stride}, bits, static_cast<float>(steps),
                               static_cast<float>(limit), seed >= 0, static_cast<uint64_t>(seed),
                               static_cast<uint64_t>(counter)},
                              rows, threads);
}

void dequantize_mean(Array scales, Array codes, Array out, Array residual, int64_t voters, int64_t numel, int64_t rows,
                     int64_t blocks, int64_t block, Array table, int64_t period, int64_t stride, int64_t bits,
                     int64_t threads) {
    gradwire::dequantize_mean({at<const float>(scales), scales.outer, scales.inner, at<const uint8_t>(codes), codes.outer,
                               codes.inner, at<void>(out), out.format, at<float>(residual), voters, numel, blocks,
                               block, {at<const Span>(table), period, stride}, bits, streams(out.format, numel)},
                              rows, threads);
}

void rotate_blocks(Array values, Array signs, int64_t numel, int64_t block, Array table, int64_t period, int64_t stride,
                   int64_t blocks_in_places, bool back, int64_t threads) {
    const Places places{at<const Span>(table), period, stride};
    gradwire::rotate_blocks({at<float>(values), at<const float>(signs), block, places, 1.0f, back}, numel,
                            blocks_in_places, threads);
}

template <void (*work)(const RowsJob&)>
void on_rows(Array values, int64_t size, Array used, Array blocks, int64_t count) {
    work({at<char>(values), size, at<uint8_t>(used), at<const Rows>(blocks), count});
}

void select_largest(Array grad, Array before, Array after, Array indices, Array values, int64_t numel, int64_t length,
                    int64_t rows, int64_t k, int64_t threads) {
    gradwire::select_largest({at<const void>(grad), grad.format, residual(before, after), at<void>(indices),
                              indices.is_long, indices.outer, at<void>(values), values.format, values.outer, numel,
                              length, rows, k},
                             threads);
}

void scatter_mean(Array indices, Array values, Array out, int64_t voters, int64_t rows, int64_t k, int64_t numel,
                  int64_t length, int64_t threads) {
    gradwire::scatter_mean({at<const void>(indices), indices.is_long, indices.outer, indices.inner,
                            at<const void>(values), values.format, values.outer, values.inner, at<float>(out), voters,
                            rows, k, numel, length},
                           threads);
}

template <void (*product)(LowRankBuffers, int64_t)>
void low_rank(Array matrices, int64_t count, Array grad, Array before, Array after, Array p, Array q, int64_t threads) {
    product({at<const Matrix>(matrices), count, at<void>(grad), grad.format, residual(before, after), at<float>(p),
             at<float>(q)},
            threads);
}

void orthogonalize(Array matrices, int64_t count, Array p, int64_t threads) {
    gradwire::orthogonalize(at<const Matrix>(matrices), count, at<float>(p), threads);
}

void normalize(Array matrices, int64_t count, Array q, Array previous, int64_t threads) {
    gradwire::normalize(at<const Matrix>(matrices), count, at<float>(q), at<const float>(previous), threads);
}

std::vector<const char*> levels() {
    std::vector<const char*> names;
    for (const Level* each : gradwire::levels()) names.push_back(each->name);
    return names;
}

const char* level() { return gradwire::level().name; }

PyMethodDef methods[] = {
    method<levels, Gil::kept>("levels"),
    method<level, Gil::kept>("level"),
    method<choose_level, Gil::kept>("choose_level"),
    method<cast_scaled, Gil::released>("cast_scaled"),
    method<gather_scaled, Gil::kept>("gather_scaled"),
    method<all_finite, Gil::released>("all_finite"),
    method<sign_pack, Gil::released>("sign_pack"),
    method<sign_unpack_mean, Gil::released>("sign_unpack_mean"),
    method<quantize_blocks, Gil::released>("quantize_blocks"),
    method<dequantize_mean, Gil::released>("dequantize_mean"),
    method<rotate_blocks, Gil::released>("rotate_blocks"),
    method<on_rows<mark_rows>, Gil::released>("mark_rows"),
    method<on_rows<clear_rows>, Gil::released>("clear_rows"),
    method<select_largest, Gil::released>("select_largest"),
    method<scatter_mean, Gil::released>("scatter_mean"),
    method<low_rank<low_rank_left>, Gil::released>("low_rank_left"),
    method<low_rank<low_rank_right>, Gil::released>("low_rank_right"),
    method<low_rank<low_rank_finish>, Gil::released>("low_rank_finish"),
    method<orthogonalize, Gil::released>("orthogonalize"),
    method<normalize, Gil::released>("normalize"),
    {},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "The inner loops of gradwire's kernels on CPUs.", -1, methods,
};

}  // namespace

}  // namespace gradwire::bindings

PyMODINIT_FUNC PyInit__kernels() {
    return gradwire::guarded([] {
        gradwire::learn_tensors();
        gradwire::Object module = gradwire::owned(PyModule_Create(&gradwire::bindings::definition));
        PyModule_AddIntConstant(module.get(), "interface", 7);  // operations.py has it too
        return module.release();
    });
}
