// The products of PowerSGD for low ranks, where memory is the limit: all ranks at once, two rows at a time. The two are
// half of all rows apart, so that each half is read in order: rows that share a page of memory come half as fast.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int64_t LOW_RANK = 4;
constexpr int64_t FACTOR_ELEMENTS = 65536;  // of Q in use at a time: 256 KiB, for the second cache

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A row of a matrix and how far behind it the next one in use lies; columns [first, last) of both.
struct Rows {
    int64_t row, distance, first, last;
};

// Calls `function(count, rows)` until all rows had their turn, in tiles of columns; `count` is 1 or 2, a constant.
template <class Function>
GRADWIRE_INLINE void over_rows(int64_t first_row, int64_t last_row, int64_t first, int64_t last, int64_t tile,
                               const Function& function) {
    const int64_t half = (last_row - first_row) / 2;
    for (int64_t column = first; column < last; column += tile) {
        const int64_t end = least(column + tile, last);
        for (int64_t row = first_row; row < first_row + half; ++row)
            function(std::integral_constant<int, 2>{}, Rows{row, half, column, end});
        for (int64_t row = first_row + 2 * half; row < last_row; ++row)
            function(std::integral_constant<int, 1>{}, Rows{row, 0, column, end});
    }
}

// Calls `function` with a rank, at most LOW_RANK, as a constant.
template <class Function>
GRADWIRE_INLINE void with_rank(int64_t rank, const Function& function) {
    switch (rank) {
        case 1: return function(std::integral_constant<int, 1>{});
        case 2: return function(std::integral_constant<int, 2>{});
        case 3: return function(std::integral_constant<int, 3>{});
        default: return function(std::integral_constant<int, LOW_RANK>{});
    }
}

// The same column of `rank` factor vectors.
template <int RANK, class Lanes>
GRADWIRE_INLINE void load_factors(const float* q, int64_t stride, Lanes lanes, F8 (&factor)[RANK]) {
    for (int r = 0; r < RANK; ++r) factor[r] = load(q + r * stride, lanes);
}

// Elements of P, each in all lanes.
template <int RANK, int COUNT>
GRADWIRE_INLINE void broadcast_factors(const LowRankJob& job, const Rows& rows, F8 (&factor)[COUNT][RANK]) {
    const Matrix& m = *job.matrix;
    for (int b = 0; b < COUNT; ++b)
        for (int r = 0; r < RANK; ++r)
            factor[b][r] = broadcast(job.p[m.left_offset + r * m.rows + rows.row + b * rows.distance]);
}

// What a buffer keeps of numbers that are stored in it.
template <class Element>
GRADWIRE_INLINE F8 rounded(F8 value) {
    if constexpr (std::is_same_v<Element, float>) return value;
    else return widened(narrowed(value, Element{}), Element{});
}

// Rows of P = M Q.
template <class Element, int RANK, int COUNT, bool ADD>
void left_rows(const LowRankJob& job, const Rows& rows) {
    const Matrix& m = *job.matrix;
    const int64_t start = m.offset + rows.row * m.columns, distance = rows.distance * m.columns;
    const float* q = job.q + m.right_offset;
    const bool streams = job.residual.from(start + rows.first).streams && distance % LANES == 0;
    F8 sums[COUNT][RANK] = {};
    over_lanes<1>(rows.first, rows.last, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 factor[RANK];
        load_factors(q + at, m.columns, lanes, factor);
        for (int b = 0; b < COUNT; ++b) {
            const int64_t place = start + b * distance + at;
            F8 value = load(static_cast<const Element*>(job.grad) + place, lanes);
            if (ADD) {
                value += load(job.residual.before + place, lanes);
                write(job.residual.after + place, value, lanes, streams);
            }
            for (int r = 0; r < RANK; ++r) sums[b][r] = multiply_add(value, factor[r], sums[b][r]);
        }
    });
    for (int b = 0; b < COUNT; ++b)
        for (int r = 0; r < RANK; ++r) {
            float* to = job.p + m.left_offset + r * m.rows + rows.row + b * rows.distance;
            *to = rows.first ? *to + sum(sums[b][r]) : sum(sums[b][r]);
        }
}

template <class Element>
void left_by_rows(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    with_rank(m.rank, [&](auto rank) {
        constexpr int RANK = decltype(rank)::value;
        over_rows(job.first, job.last, 0, m.columns, FACTOR_ELEMENTS / RANK, [&](auto count, const Rows& rows) {
            if (job.residual) left_rows<Element, RANK, decltype(count)::value, true>(job, rows);
            else left_rows<Element, RANK, decltype(count)::value, false>(job, rows);
        });
    });
}

// Adds the products of rows with their elements of P to Q^T = P^T M.
template <class Element, int RANK, int COUNT>
void right_rows(const LowRankJob& job, const Rows& rows) {
    const Matrix& m = *job.matrix;
    const Element* matrix = static_cast<const Element*>(job.grad) + m.offset + rows.row * m.columns;
    float* q = job.q + m.right_offset;
    F8 factor[COUNT][RANK];
    broadcast_factors(job, rows, factor);
    over_lanes<1>(rows.first, rows.last, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 total[RANK];
        load_factors(q + at, m.columns, lanes, total);
        for (int b = 0; b < COUNT; ++b) {
            const F8 value = load(matrix + b * rows.distance * m.columns + at, lanes);
            for (int r = 0; r < RANK; ++r) total[r] = multiply_add(value, factor[b][r], total[r]);
        }
        for (int r = 0; r < RANK; ++r) store(q + r * m.columns + at, total[r], lanes);
    });
}

template <class Element>
void right_by_rows(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    with_rank(m.rank, [&](auto rank) {
        constexpr int RANK = decltype(rank)::value;
        over_rows(job.first, job.last, 0, m.columns, FACTOR_ELEMENTS / RANK,
                  [&](auto count, const Rows& rows) { right_rows<Element, RANK, decltype(count)::value>(job, rows); });
    });
}

// Rows of P Q^T into the gradient; the residual, if there is one, keeps the difference.
template <class Element, int RANK, int COUNT>
void finish_rows(const LowRankJob& job, const Rows& rows) {
    const Matrix& m = *job.matrix;
    float* held = job.residual.after;
    const int64_t start = m.offset + rows.row * m.columns, distance = rows.distance * m.columns;
    const float* q = job.q + m.right_offset;
    F8 factor[COUNT][RANK];
    broadcast_factors(job, rows, factor);
    over_lanes<1>(rows.first, rows.last, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 other[RANK];
        load_factors(q + at, m.columns, lanes, other);
        for (int b = 0; b < COUNT; ++b) {
            F8 product = factor[b][0] * other[0];
            for (int r = 1; r < RANK; ++r) product += factor[b][r] * other[r];  // rounded alike on every level
            const int64_t place = start + b * distance + at;
            store(static_cast<Element*>(job.grad) + place, product, lanes);
            if (held) store(held + place, load(held + place, lanes) - rounded<Element>(product), lanes);
        }
    });
}

template <class Element>
void finish_by_rows(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    with_rank(m.rank, [&](auto rank) {
        constexpr int RANK = decltype(rank)::value;
        over_rows(job.first, job.last, 0, m.columns, FACTOR_ELEMENTS / RANK,
                  [&](auto count, const Rows& rows) { finish_rows<Element, RANK, decltype(count)::value>(job, rows); });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
