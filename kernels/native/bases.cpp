// Orthonormal bases and unit vectors: a matrix after the other, on several threads.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

// Calls `work(matrix)` for every matrix; `elements` tells how much work they all are.
template <class Work>
void each(const Matrix* matrices, int64_t count, int64_t elements, int64_t threads, const Work& work) {
    const Shares shares(threads, elements, count);
    share(shares, [&](int64_t part, int64_t) {
        for (int64_t i = cut(count, shares.parts, part); i < cut(count, shares.parts, part + 1); ++i) work(matrices[i]);
    });
}

}  // namespace

void orthogonalize(const Matrix* matrices, int64_t count, float* p, int64_t threads) {
    int64_t work = 0;
    for (int64_t i = 0; i < count; ++i) work += matrices[i].rows * matrices[i].rank * (matrices[i].rank + 1);
    each(matrices, count, work, threads,
         [&](const Matrix& m) { level().orthogonalize(p + m.left_offset, m.rank, m.rows); });
}

void normalize(const Matrix* matrices, int64_t count, float* q, const float* previous, int64_t threads) {
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) elements += matrices[i].columns * matrices[i].rank;
    each(matrices, count, elements, threads, [&](const Matrix& m) {
        for (int64_t at = m.right_offset; at < m.right_offset + m.rank * m.columns; at += m.columns)
            level().normalize(q + at, previous ? previous + at : nullptr, m.columns);
    });
}

}  // namespace gradwire
