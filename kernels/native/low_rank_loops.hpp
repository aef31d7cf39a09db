// The products of PowerSGD: blocks of 4 rows and 3 ranks in registers, strips of a block's columns in the nearest
// cache, and factors in the second. Every element of the matrix comes from memory once.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int ROWS = 4, RANKS = 3;  // of a block; 12 sums, and what is multiplied, fill 16 registers
constexpr int64_t STRIP = 512;              // columns of a block of rows that all ranks use before the next come
constexpr int64_t FACTOR_ELEMENTS = 65536;  // of Q in use at a time: 256 KiB
constexpr int64_t LARGEST_RANK = 32;

// Columns whose part of Q fits the second cache.
inline int64_t tile_columns(int64_t rank) { return (FACTOR_ELEMENTS / rank) & ~(STRIP - 1); }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls `function` with the number of ranks in the next block as a constant.
template <class Function>
GRADWIRE_INLINE void with_ranks(int64_t left, Function function) {
    if (left >= 3) function(std::integral_constant<int, 3>{});
    else if (left == 2) function(std::integral_constant<int, 2>{});
    else function(std::integral_constant<int, 1>{});
}

// P for BLOCK rows and WIDTH ranks over one strip: sums[row * WIDTH + rank] take up the products.
template <int BLOCK, int WIDTH, bool ADD>
GRADWIRE_INLINE void left_strip(const float* matrix, float* residual, int64_t stride, const float* q, int64_t q_stride,
                                int64_t columns, F8* sums) {
    F8 total[BLOCK * WIDTH];
    for (int i = 0; i < BLOCK * WIDTH; ++i) total[i] = sums[i];
    const auto step = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
        const bool full = count == LANES;
        F8 factor[WIDTH];
        for (int r = 0; r < WIDTH; ++r)
            factor[r] = full ? load(q + r * q_stride + at) : load(q + r * q_stride + at, count);
        for (int b = 0; b < BLOCK; ++b) {
            const int64_t place = b * stride + at;
            F8 value = full ? load(matrix + place) : load(matrix + place, count);
            if (ADD) {
                value += full ? load(residual + place) : load(residual + place, count);
                full ? store(residual + place, value) : store(residual + place, value, count);
            }
            for (int r = 0; r < WIDTH; ++r) total[b * WIDTH + r] += value * factor[r];
        }
    };
    const int64_t whole = columns / LANES * LANES;
    for (int64_t at = 0; at < whole; at += LANES) step(at, LANES);
    if (whole < columns) step(whole, columns - whole);
    for (int i = 0; i < BLOCK * WIDTH; ++i) sums[i] = total[i];
}

template <int BLOCK>
void left_block(const LowRankJob& job, int64_t row, int64_t first_column, int64_t last_column) {
    const Matrix& m = *job.matrix;
    F8 sums[BLOCK * LARGEST_RANK] = {};
    for (int64_t column = first_column; column < last_column; column += STRIP) {
        const int64_t place = m.offset + row * m.columns + column, count = least(STRIP, last_column - column);
        const float* source = job.grad + place;
        float* residual = job.residual ? job.residual + place : nullptr;
        for (int64_t rank = 0; rank < m.rank; rank += RANKS) {
            const float* q = job.q + m.right_offset + rank * m.columns + column;
            F8* part = sums + BLOCK * rank;
            const bool add = residual && rank == 0;
            const float* from = residual && rank ? residual : source;
            with_ranks(m.rank - rank, [&](auto ranks) __attribute__((always_inline)) {
                constexpr int WIDTH = decltype(ranks)::value;
                if (add) left_strip<BLOCK, WIDTH, true>(from, residual, m.columns, q, m.columns, count, part);
                else left_strip<BLOCK, WIDTH, false>(from, nullptr, m.columns, q, m.columns, count, part);
            });
        }
    }
    for (int64_t rank = 0; rank < m.rank; ++rank) {
        const int64_t start = rank / RANKS * RANKS, width = least(RANKS, m.rank - start);
        for (int b = 0; b < BLOCK; ++b) {
            float* to = job.p + m.left_offset + rank * m.rows + row + b;
            const float product = sum(sums[BLOCK * start + b * width + (rank - start)]);
            *to = first_column ? *to + product : product;
        }
    }
}

// Rows [first, last) of P = M Q.
inline void left(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    const int64_t tile = tile_columns(m.rank);
    for (int64_t column = 0; column < m.columns; column += tile) {
        const int64_t end = least(column + tile, m.columns);
        int64_t row = job.first;
        for (; row + ROWS <= job.last; row += ROWS) left_block<ROWS>(job, row, column, end);
        for (; row < job.last; ++row) left_block<1>(job, row, column, end);
    }
}

// Adds the products of BLOCK rows with WIDTH columns of P to one strip of Q.
template <int BLOCK, int WIDTH>
GRADWIRE_INLINE void right_strip(const float* matrix, const float* p, float* q, const Matrix& m, int64_t columns) {
    F8 factor[BLOCK * WIDTH];
    for (int b = 0; b < BLOCK; ++b)
        for (int r = 0; r < WIDTH; ++r) factor[b * WIDTH + r] = broadcast(p[r * m.rows + b]);
    const auto step = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
        const bool full = count == LANES;
        F8 total[WIDTH];
        for (int r = 0; r < WIDTH; ++r)
            total[r] = full ? load(q + r * m.columns + at) : load(q + r * m.columns + at, count);
        for (int b = 0; b < BLOCK; ++b) {
            const int64_t place = b * m.columns + at;
            const F8 value = full ? load(matrix + place) : load(matrix + place, count);
            for (int r = 0; r < WIDTH; ++r) total[r] += value * factor[b * WIDTH + r];
        }
        for (int r = 0; r < WIDTH; ++r)
            full ? store(q + r * m.columns + at, total[r]) : store(q + r * m.columns + at, total[r], count);
    };
    const int64_t whole = columns / LANES * LANES;
    for (int64_t at = 0; at < whole; at += LANES) step(at, LANES);
    if (whole < columns) step(whole, columns - whole);
}

template <int BLOCK>
void right_block(const LowRankJob& job, int64_t row, int64_t first_column, int64_t last_column) {
    const Matrix& m = *job.matrix;
    for (int64_t column = first_column; column < last_column; column += STRIP) {
        const int64_t count = least(STRIP, last_column - column);
        const float* matrix = job.grad + m.offset + row * m.columns + column;
        for (int64_t rank = 0; rank < m.rank; rank += RANKS) {
            const float* p = job.p + m.left_offset + rank * m.rows + row;
            float* q = job.q + m.right_offset + rank * m.columns + column;
            with_ranks(m.rank - rank, [&](auto ranks) __attribute__((always_inline)) {
                right_strip<BLOCK, decltype(ranks)::value>(matrix, p, q, m, count);
            });
        }
    }
}

// Columns [first, last) of Q^T = P^T M.
inline void right(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    for (int64_t rank = 0; rank < m.rank; ++rank)
        std::memset(job.q + m.right_offset + rank * m.columns + job.first, 0,
                    static_cast<size_t>(job.last - job.first) * sizeof(float));
    const int64_t tile = tile_columns(m.rank);
    for (int64_t column = job.first; column < job.last; column += tile) {
        const int64_t end = least(column + tile, job.last);
        int64_t row = 0;
        for (; row + ROWS <= m.rows; row += ROWS) right_block<ROWS>(job, row, column, end);
        for (; row < m.rows; ++row) right_block<1>(job, row, column, end);
    }
}

// BLOCK rows and `GROUPS * LANES` columns of P Q^T, or fewer columns of the last group where `count` says so.
template <int BLOCK, int GROUPS>
GRADWIRE_INLINE void finish_lanes(const Matrix& m, float* grad, float* residual, const float* p, const float* q,
                                  int64_t count) {
    const bool full = count == GROUPS * LANES;
    F8 total[BLOCK * GROUPS] = {};
    for (int64_t rank = 0; rank < m.rank; ++rank) {
        F8 factor[GROUPS];
        for (int g = 0; g < GROUPS; ++g) {
            const float* from = q + rank * m.columns + g * LANES;
            factor[g] = full ? load(from) : load(from, count);
        }
        for (int b = 0; b < BLOCK; ++b) {
            const F8 scale = broadcast(p[rank * m.rows + b]);
            for (int g = 0; g < GROUPS; ++g) total[b * GROUPS + g] += scale * factor[g];
        }
    }
    for (int b = 0; b < BLOCK; ++b)
        for (int g = 0; g < GROUPS; ++g) {
            const int64_t place = b * m.columns + g * LANES;
            const F8 product = total[b * GROUPS + g];
            full ? store(grad + place, product) : store(grad + place, product, count);
            if (!residual) continue;
            const F8 rest = (full ? load(residual + place) : load(residual + place, count)) - product;
            full ? store(residual + place, rest) : store(residual + place, rest, count);
        }
}

template <int BLOCK>
void finish_block(const LowRankJob& job, int64_t row, int64_t first_column, int64_t last_column) {
    const Matrix& m = *job.matrix;
    const int64_t start = m.offset + row * m.columns;
    const float* p = job.p + m.left_offset + row;
    const float* q = job.q + m.right_offset;
    const auto step = [&](auto groups, int64_t column, int64_t count) __attribute__((always_inline)) {
        float* residual = job.residual ? job.residual + start + column : nullptr;
        finish_lanes<BLOCK, decltype(groups)::value>(m, job.grad + start + column, residual, p, q + column, count);
    };
    int64_t column = first_column;
    for (; column + 3 * LANES <= last_column; column += 3 * LANES)
        step(std::integral_constant<int, 3>{}, column, 3 * LANES);
    for (; column < last_column; column += LANES)
        step(std::integral_constant<int, 1>{}, column, least(LANES, last_column - column));
}

// Rows [first, last) of P Q^T into the gradient; the residual keeps the difference.
inline void finish(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    const int64_t tile = tile_columns(m.rank);
    for (int64_t column = 0; column < m.columns; column += tile) {
        const int64_t end = least(column + tile, m.columns);
        int64_t row = job.first;
        for (; row + ROWS <= job.last; row += ROWS) finish_block<ROWS>(job, row, column, end);
        for (; row < job.last; ++row) finish_block<1>(job, row, column, end);
    }
}

}  // namespace gradwire::GRADWIRE_LEVEL
