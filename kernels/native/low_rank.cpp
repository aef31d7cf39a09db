// The arithmetic of PowerSGD: all matrices of a bucket in one go.
#include <vector>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t ROW_STEP = 8, COLUMN_STEP = 16;  // parts end where panels of rows or whole cache lines do

using Loop = void (*)(const LowRankJob&);

// How many of `lines` rows or columns lie before a part's boundary, `inside` elements into a matrix of `size`.
int64_t lines_before(int64_t inside, int64_t size, int64_t lines, int64_t step) {
    if (inside <= 0) return 0;
    if (inside >= size) return lines;
    return std::min(lines, inside / (size / lines) / step * step);
}

// Parts have equal numbers of elements, but for whole rows or columns.
void run(const LowRankBuffers& buffers, int64_t threads, bool by_columns, Loop loop) {
    int64_t total = 0;
    for (int64_t i = 0; i < buffers.count; ++i) total += buffers.matrices[i].rows * buffers.matrices[i].columns;
    const Shares shares(threads, total);
    share(shares, [&](int64_t part, int64_t) {
        const int64_t first = cut(total, shares.parts, part), last = cut(total, shares.parts, part + 1);
        int64_t start = 0;
        for (int64_t i = 0; i < buffers.count; ++i) {
            const Matrix& m = buffers.matrices[i];
            const int64_t size = m.rows * m.columns, lines = by_columns ? m.columns : m.rows;
            const int64_t step = by_columns ? COLUMN_STEP : ROW_STEP;
            const int64_t from = lines_before(first - start, size, lines, step);
            const int64_t to = lines_before(last - start, size, lines, step);
            if (from < to) loop({&m, from, to, buffers.grad, buffers.residual, buffers.p, buffers.q});
            start += size;
        }
    });
}

// Calls `work(matrix)` for every matrix; `elements` tells how much work they all are.
template <class Work>
void each(const Matrix* matrices, int64_t count, int64_t elements, int64_t threads, const Work& work) {
    const Shares shares(threads, elements, count);
    share(shares, [&](int64_t part, int64_t) {
        for (int64_t i = cut(count, shares.parts, part); i < cut(count, shares.parts, part + 1); ++i) work(matrices[i]);
    });
}

}  // namespace

void low_rank_left(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().left); }

void low_rank_right(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, true, level().right); }

void low_rank_finish(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().finish); }

void orthogonalize(const Matrix* matrices, int64_t count, float* p, int64_t threads) {
    int64_t work = 0;
    for (int64_t i = 0; i < count; ++i) work += matrices[i].rows * matrices[i].rank * (matrices[i].rank + 1);
    each(matrices, count, work, threads, [&](const Matrix& m) { level().orthogonalize(p + m.left_offset, m.rank, m.rows); });
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
