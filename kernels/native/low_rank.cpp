// The products of PowerSGD: all matrices of a bucket in one go.
#include <vector>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t ROWS = 8;       // of a panel: no piece ends within one
constexpr int64_t COLUMNS = 256;  // of a piece at least, where the matrix has them: narrower ones are read slowly

using Loop = void (*)(const LowRankJob&);

// Some rows or columns of a matrix.
struct Piece {
    const Matrix* matrix;
    int64_t first, last;
};

// The matrices cut into rows or columns, about as many elements in each piece as each thread should take at a time.
std::vector<Piece> pieces_of(const LowRankBuffers& buffers, int64_t elements, bool by_columns) {
    std::vector<Piece> pieces;
    for (const Matrix* m = buffers.matrices; m != buffers.matrices + buffers.count; ++m) {
        const int64_t lines = by_columns ? m->columns : m->rows, step = by_columns ? COLUMNS : ROWS;
        const int64_t parts =
            std::clamp<int64_t>(m->rows * m->columns / elements, 1, std::max<int64_t>(lines / step, 1));
        for (int64_t part = 0; part < parts; ++part)
            pieces.push_back({m, cut(lines, parts, part, step), cut(lines, parts, part + 1, step)});
    }
    return pieces;
}

void run(const LowRankBuffers& buffers, int64_t threads, bool by_columns, Loop loop) {
    int64_t total = 0;
    for (int64_t i = 0; i < buffers.count; ++i) total += buffers.matrices[i].rows * buffers.matrices[i].columns;
    const Shares wanted(threads, total);
    const std::vector<Piece> pieces = pieces_of(buffers, total / wanted.parts + 1, by_columns);
    const int64_t count = static_cast<int64_t>(pieces.size());
    const Shares shares(threads, total, count);
    share(shares, [&](int64_t part, int64_t) {
        for (int64_t i = cut(count, shares.parts, part); i < cut(count, shares.parts, part + 1); ++i)
            loop({pieces[i].matrix, pieces[i].first, pieces[i].last, buffers.grad, buffers.residual, buffers.p,
                  buffers.q});
    });
}

}  // namespace

void low_rank_left(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().left); }

void low_rank_right(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, true, level().right); }

void low_rank_finish(const LowRankBuffers& buffers, int64_t threads) { run(buffers, threads, false, level().finish); }

}  // namespace gradwire
