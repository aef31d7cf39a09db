// The products of PowerSGD for higher ranks, where arithmetic is the limit: panels of a matrix, copied to where the
// nearest cache holds them, are used by all ranks, BLOCK rows and WIDTH ranks at a time.
namespace gradwire::GRADWIRE_LEVEL {

constexpr int BLOCK = 4, WIDTH = 3;  // 12 sums, and what is multiplied, fill 16 registers
constexpr int PANEL = 8;             // rows
constexpr int64_t STRIP = 512;       // columns
constexpr int64_t LARGEST_RANK = 32;

// Some rows of a matrix and some of their columns.
struct Place {
    int64_t row, rows, column, columns;
    int64_t blocks() const { return (rows + BLOCK - 1) / BLOCK; }
    int64_t start(const Matrix& m) const { return m.offset + row * m.columns + column; }
};

// The elements of a place; what fills up its last block is zero.
struct alignas(64) Panel {
    float elements[PANEL * STRIP];
    float* row(int64_t index) { return elements + index * STRIP; }
};

// Calls `function(row, place, lanes)` for all vectors of a place, two rows at a time that seldom share a page of
// memory.
template <class Function>
GRADWIRE_INLINE void over_place(const Place& place, int64_t columns, const Function& function) {
    constexpr int64_t HALF = PANEL / 2;
    for (int64_t row = 0; row < least(HALF, place.rows); ++row) {
        const bool both = row + HALF < place.rows;
        over_lanes<1>(0, place.columns, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
            function(row, row * columns + at, at, lanes);
            if (both) function(row + HALF, (row + HALF) * columns + at, at, lanes);
        });
    }
}

// Calls `function(place)` for one strip of [first, last) after the other.
template <class Function>
void over_strips(Place place, int64_t first, int64_t last, const Function& function) {
    for (place.column = first; place.column < last; place.column += STRIP) {
        place.columns = least(STRIP, last - place.column);
        function(place);
    }
}

// Calls `function(rank, width, block)` for all groups of ranks, and within each for all blocks of rows.
template <class Function>
GRADWIRE_INLINE void over_groups(int64_t ranks, int64_t blocks, const Function& function) {
    const auto over_blocks = [&](int64_t rank, auto width) GRADWIRE_LAMBDA {
        for (int64_t block = 0; block < blocks; ++block) function(rank, width, block);
    };
    int64_t rank = 0;
    for (; rank + WIDTH <= ranks; rank += WIDTH) over_blocks(rank, std::integral_constant<int, WIDTH>{});
    if (ranks - rank == 2) over_blocks(rank, std::integral_constant<int, 2>{});
    if (ranks - rank == 1) over_blocks(rank, std::integral_constant<int, 1>{});
}

// Copies a place of the matrix; with a residual it is the sum with the gradient, which stays in the residual after.
template <class Element>
void fill(const LowRankJob& job, const Place& place, Panel& panel) {
    const int64_t start = place.start(*job.matrix);
    const Element* grad = static_cast<const Element*>(job.grad) + start;
    const Residual residual = job.residual.from(start);
    const bool streams = residual.streams && job.matrix->columns % LANES == 0;
    over_place(place, job.matrix->columns, [&](int64_t row, int64_t from, int64_t at, auto lanes) GRADWIRE_LAMBDA {
        F8 value = load(grad + from, lanes);
        if (residual) {
            value += load(residual.before + from, lanes);
            write(residual.after + from, value, lanes, streams);
        }
        store(panel.row(row) + at, value);
    });
    for (int64_t row = place.rows; row < place.blocks() * BLOCK; ++row)
        std::memset(panel.row(row), 0, STRIP * sizeof(float));
}

// Writes a place of P Q^T to the gradient; the residual, if there is one, keeps the difference.
template <class Element>
void empty(const LowRankJob& job, const Place& place, Panel& panel) {
    const int64_t start = place.start(*job.matrix);
    Element* grad = static_cast<Element*>(job.grad) + start;
    float* held = job.residual.from(start).after;
    over_place(place, job.matrix->columns, [&](int64_t row, int64_t to, int64_t at, auto lanes) GRADWIRE_LAMBDA {
        const F8 product = load(panel.row(row) + at);
        store(grad + to, product, lanes);
        if (held) store(held + to, load(held + to, lanes) - rounded<Element>(product), lanes);
    });
}

// Elements of P for the rows of a place, PANEL for each rank.
struct PanelFactors {
    float elements[LARGEST_RANK * PANEL] = {};
    PanelFactors(const LowRankJob& job, const Place& place) {
        const Matrix& m = *job.matrix;
        for (int64_t rank = 0; rank < m.rank; ++rank)
            for (int64_t row = 0; row < place.rows; ++row)
                elements[rank * PANEL + row] = job.p[m.left_offset + rank * m.rows + place.row + row];
    }
};

// Adds the products of a strip to the sums of BLOCK rows and RANKS ranks.
template <int RANKS>
GRADWIRE_INLINE void left_block(const float* rows, const float* q, int64_t stride, int64_t columns, F8* sums) {
    F8 total[RANKS * BLOCK];
    for (int i = 0; i < RANKS * BLOCK; ++i) total[i] = sums[i];
    over_lanes<1>(0, columns, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 factor[RANKS];
        load_factors(q + at, stride, lanes, factor);
        for (int b = 0; b < BLOCK; ++b) {
            const F8 value = load(rows + b * STRIP + at);
            for (int r = 0; r < RANKS; ++r) total[r * BLOCK + b] = multiply_add(value, factor[r], total[r * BLOCK + b]);
        }
    });
    for (int i = 0; i < RANKS * BLOCK; ++i) sums[i] = total[i];
}

// Rows of P = M Q, over columns [first, last).
template <class Element>
void left_panel(const LowRankJob& job, const Place& rows, int64_t first, int64_t last) {
    const Matrix& m = *job.matrix;
    F8 sums[PANEL * LARGEST_RANK] = {};  // by block, then by rank, then by row
    Panel panel;
    over_strips(rows, first, last, [&](const Place& place) {
        fill<Element>(job, place, panel);
        over_groups(m.rank, place.blocks(), [&](int64_t rank, auto width, int64_t block) GRADWIRE_LAMBDA {
            const float* q = job.q + m.right_offset + rank * m.columns + place.column;
            left_block<decltype(width)::value>(panel.row(block * BLOCK), q, m.columns, place.columns,
                                               sums + (block * m.rank + rank) * BLOCK);
        });
    });
    for (int64_t block = 0; block < rows.blocks(); ++block)
        for (int64_t rank = 0; rank < m.rank; ++rank) {
            float products[BLOCK];
            sums_of_four(sums + (block * m.rank + rank) * BLOCK, products);
            float* p = job.p + m.left_offset + rank * m.rows + rows.row;
            for (int64_t row = block * BLOCK; row < least(rows.rows, (block + 1) * BLOCK); ++row)
                p[row] = first ? p[row] + products[row % BLOCK] : products[row % BLOCK];
        }
}

template <class Element>
void left_by_panels(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    const int64_t tile = FACTOR_ELEMENTS / m.rank / STRIP * STRIP;
    for (int64_t column = 0; column < m.columns; column += tile)
        for (int64_t row = job.first; row < job.last; row += PANEL)
            left_panel<Element>(job, {row, least(PANEL, job.last - row), 0, 0}, column, least(column + tile, m.columns));
}

// Adds the products of BLOCK rows with RANKS columns of P to a strip of Q.
template <int RANKS>
GRADWIRE_INLINE void right_block(const float* rows, const float* p, float* q, int64_t stride, int64_t columns) {
    F8 factor[RANKS * BLOCK];
    for (int r = 0; r < RANKS; ++r)
        for (int b = 0; b < BLOCK; ++b) factor[r * BLOCK + b] = broadcast(p[r * PANEL + b]);
    over_lanes<1>(0, columns, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 total[RANKS];
        load_factors(q + at, stride, lanes, total);
        for (int b = 0; b < BLOCK; ++b) {
            const F8 value = load(rows + b * STRIP + at);
            for (int r = 0; r < RANKS; ++r) total[r] = multiply_add(value, factor[r * BLOCK + b], total[r]);
        }
        for (int r = 0; r < RANKS; ++r) store(q + r * stride + at, total[r], lanes);
    });
}

template <class Element>
void right_by_panels(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    Panel panel;
    for (int64_t column = 0; column < m.columns; column += STRIP)
        for (int64_t row = job.first; row < job.last; row += PANEL) {
            const Place place{row, least(PANEL, job.last - row), column, least(STRIP, m.columns - column)};
            const PanelFactors p(job, place);
            fill<Element>(job, place, panel);
            over_groups(m.rank, place.blocks(), [&](int64_t rank, auto width, int64_t block) GRADWIRE_LAMBDA {
                float* q = job.q + m.right_offset + rank * m.columns + column;
                right_block<decltype(width)::value>(panel.row(block * BLOCK), p.elements + rank * PANEL + block * BLOCK,
                                                    q, m.columns, place.columns);
            });
        }
}

// BLOCK rows and GROUPS vectors of columns of P Q^T.
template <int GROUPS, class Lanes>
GRADWIRE_INLINE void finish_block(const float* p, const float* q, int64_t stride, int64_t ranks, float* rows,
                                  Lanes lanes) {
    F8 total[BLOCK * GROUPS] = {};
    for (int64_t rank = 0; rank < ranks; ++rank) {
        F8 factor[GROUPS];
        for (int g = 0; g < GROUPS; ++g) factor[g] = load(q + rank * stride + g * LANES, lanes);
        for (int b = 0; b < BLOCK; ++b) {
            const F8 scale = broadcast(p[rank * PANEL + b]);
            for (int g = 0; g < GROUPS; ++g) total[b * GROUPS + g] += scale * factor[g];  // rounded alike on every level
        }
    }
    for (int b = 0; b < BLOCK; ++b)
        for (int g = 0; g < GROUPS; ++g) store(rows + b * STRIP + g * LANES, total[b * GROUPS + g]);
}

// A place of P Q^T.
inline void multiply_out(const LowRankJob& job, const Place& place, const PanelFactors& p, Panel& panel) {
    const Matrix& m = *job.matrix;
    const float* q = job.q + m.right_offset + place.column;
    const auto all_rows = [&](auto groups, int64_t at, auto lanes) GRADWIRE_LAMBDA {
        for (int64_t block = 0; block < place.blocks(); ++block)
            finish_block<decltype(groups)::value>(p.elements + block * BLOCK, q + at, m.columns, m.rank,
                                                  panel.row(block * BLOCK) + at, lanes);
    };
    int64_t at = 0;
    for (; at + WIDTH * LANES <= place.columns; at += WIDTH * LANES)
        all_rows(std::integral_constant<int, WIDTH>{}, at, Whole{});
    over_lanes<1>(at, place.columns, [&](int64_t column, auto lanes, int) GRADWIRE_LAMBDA {
        all_rows(std::integral_constant<int, 1>{}, column, lanes);
    });
}

template <class Element>
void finish_by_panels(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    Panel panel;
    for (int64_t row = job.first; row < job.last; row += PANEL) {
        const Place rows{row, least(PANEL, job.last - row), 0, 0};
        const PanelFactors p(job, rows);
        over_strips(rows, 0, m.columns, [&](const Place& place) {
            multiply_out(job, place, p, panel);
            empty<Element>(job, place, panel);
        });
    }
}

template <class Element>
void left_of(const LowRankJob& job) {
    job.matrix->rank <= LOW_RANK ? left_by_rows<Element>(job) : left_by_panels<Element>(job);
}

template <class Element>
void right_of(const LowRankJob& job) {
    job.matrix->rank <= LOW_RANK ? right_by_rows<Element>(job) : right_by_panels<Element>(job);
}

template <class Element>
void finish_of(const LowRankJob& job) {
    job.matrix->rank <= LOW_RANK ? finish_by_rows<Element>(job) : finish_by_panels<Element>(job);
}

// Rows [first, last) of P = M Q.
inline void left(const LowRankJob& job) {
    with_element(job.format, [&](auto* element) { left_of<std::remove_pointer_t<decltype(element)>>(job); });
    if (job.residual.streams) end_stream();
}

// What rows [first, last) add to Q^T = P^T M.
inline void right(const LowRankJob& job) {
    const Matrix& m = *job.matrix;
    std::memset(job.q + m.right_offset, 0, static_cast<size_t>(m.rank * m.columns) * sizeof(float));
    with_element(job.format, [&](auto* element) { right_of<std::remove_pointer_t<decltype(element)>>(job); });
}

// Rows [first, last) of P Q^T into the gradient; the residual, if there is one, keeps the difference.
inline void finish(const LowRankJob& job) {
    with_element(job.format, [&](auto* element) { finish_of<std::remove_pointer_t<decltype(element)>>(job); });
}

}  // namespace gradwire::GRADWIRE_LEVEL
