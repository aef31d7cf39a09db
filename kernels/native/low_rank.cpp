// The products of PowerSGD: all matrices of a bucket in one go, cut into equal shares by elements.
#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t ROW_STEP = 4, COLUMN_STEP = 16;  // shares end where full blocks of rows or whole cache lines do

using Loop = void (*)(const LowRankJob&);

// How many of `lines` rows or columns lie before a share's boundary, `inside` elements into a matrix of `size`.
int64_t lines_before(int64_t inside, int64_t size, int64_t lines, int64_t step) {
    if (inside <= 0) return 0;
    if (inside >= size) return lines;
    return std::min(lines, inside / (size / lines) / step * step);
}

void run(const LowRankBuffers& buffers, int64_t threads, bool by_columns, Loop loop) {
    int64_t total = 0;
    for (int64_t i = 0; i < buffers.count; ++i) total += buffers.matrices[i].rows * buffers.matrices[i].columns;
    threads = useful_threads(threads, total);
    on_threads(threads, [&](int64_t thread) {
        const int64_t first = cut(total, threads, thread), last = cut(total, threads, thread + 1);
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

}  // namespace

void low_rank_left(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().left); }

void low_rank_right(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, true, level().right); }

void low_rank_finish(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().finish); }

}  // namespace gradwire
