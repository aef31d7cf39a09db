// Selection of the largest magnitudes: samples, candidates above a threshold, and what is sent of those that
// selection.cpp chooses.
namespace gradwire::GRADWIRE_LEVEL {

// The bits of |value|, those of infinity for NaN: as integers they are ordered like magnitudes.
GRADWIRE_INLINE I8 ordered_magnitude(F8 value) {
    const I8 bits = magnitude(value), infinity = I8{} + 0x7f800000;
    return bits > infinity ? infinity : bits;
}

template <class Element>
void sample_row(const Row& row, const int64_t* indices, int64_t count, uint32_t* magnitudes) {
    const Element* grad = static_cast<const Element*>(row.grad);
    for (int64_t i = 0; i < count; ++i) {
        F8 value = load(grad + indices[i], Part{1});
        if (row.residual) value += broadcast(row.residual.before[indices[i]]);
        magnitudes[i] = static_cast<uint32_t>(ordered_magnitude(value)[0]);
    }
}

inline void sample(const Row& row, const int64_t* indices, int64_t count, uint32_t* magnitudes) {
    with_element(row.format, [&](auto* element) {
        sample_row<std::remove_pointer_t<decltype(element)>>(row, indices, count, magnitudes);
    });
}

// Writes those of TURNS vectors that reach the threshold, in order; returns their number. With a sum, that of gradient
// and residual goes into the residual after first.
template <bool ADD, int TURNS, class Element, class Lanes>
GRADWIRE_INLINE int64_t scan_lanes(const Element* grad, Residual residual, int64_t at, Lanes lanes, I8 below,
                                   Candidate* found) {
    I8 magnitudes[TURNS];
    uint32_t reached = 0;
    for (int turn = 0; turn < TURNS; ++turn) {
        const int64_t place = at + turn * LANES;
        F8 value = load(grad + place, lanes);
        if (ADD) {
            value += load(residual.before + place, lanes);
            write(residual.after + place, value, lanes, residual.streams);
        }
        magnitudes[turn] = ordered_magnitude(value);
        reached |= (mask(magnitudes[turn] > below) & all_of(lanes)) << (LANES * turn);
    }
    if (!reached) return 0;
    int32_t sizes[TURNS * LANES];
    std::memcpy(sizes, magnitudes, sizeof(sizes));
    int64_t total = 0;
    for (; reached; reached &= reached - 1, ++total) {
        const int lane = __builtin_ctz(reached);
        found[total] = {at + lane, static_cast<uint32_t>(sizes[lane])};
    }
    return total;
}

// Elements of [first, last) that reach the threshold; room for all of them. Returns their number.
template <bool ADD, class Element>
int64_t scan_row(const Element* grad, Residual residual, int64_t first, int64_t last, uint32_t threshold,
                 Candidate* found) {
    const I8 below = I8{} + static_cast<int32_t>(threshold) - 1;
    residual.streams = residual.from(first).streams;
    Candidate* next = found;
    int64_t at = first;
    for (; at + 4 * LANES <= last; at += 4 * LANES)
        next += scan_lanes<ADD, 4>(grad, residual, at, Whole{}, below, next);
    over_lanes<1>(at, last, [&](int64_t place, auto lanes, int) GRADWIRE_LAMBDA {
        next += scan_lanes<ADD, 1>(grad, residual, place, lanes, below, next);
    });
    if (residual.streams) end_stream();
    return next - found;
}

inline int64_t scan(const Row& row, bool add, int64_t first, int64_t last, uint32_t threshold, Candidate* found) {
    if (row.residual && !add) return scan_row<false>(row.residual.after, {}, first, last, threshold, found);
    return with_element(row.format, [&](auto* element) {
        const auto* grad = static_cast<const std::remove_pointer_t<decltype(element)>*>(row.grad);
        return add ? scan_row<true>(grad, row.residual, first, last, threshold, found)
                   : scan_row<false>(grad, {}, first, last, threshold, found);
    });
}

template <class Value>
constexpr float largest_finite() {
    return std::is_same_v<Value, Float16> ? 65504.0f : std::is_same_v<Value, BFloat16> ? 0x1.fep127f : 0x1.fffffep127f;
}

// Finite numbers within the range of the format, infinities and NaN as they are.
template <class Value>
GRADWIRE_INLINE F8 in_range(F8 value) {
    const F8 limit = broadcast(largest_finite<Value>());
    const I8 beyond = (absolute(value) > limit) & (magnitude(value) < 0x7f800000);
    const U8 clamped = bit_cast<U8>(limit) | (bit_cast<U8>(value) & 0x80000000u);
    return bit_cast<F8>((bit_cast<U8>(beyond) & clamped) | (~bit_cast<U8>(beyond) & bit_cast<U8>(value)));
}

// Writes chosen elements as they are sent, of `held` where there is one, which keeps what rounding loses.
template <class Element, class Value>
void take_chosen(const Element* grad, float* held, const Candidate* chosen, int64_t count, Value* values) {
    over_lanes<1>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F8 value = {};
        for (int64_t j = 0; j < size_of(lanes); ++j) {
            const int64_t index = chosen[at + j].index;
            value[j] = held ? held[index] : load(grad + index, Part{1})[0];
        }
        Value sent[LANES];
        store(sent, in_range<Value>(value));
        store(values + at, load(sent), lanes);
        const F8 rest = value - load(sent);
        for (int64_t j = 0; held && j < size_of(lanes); ++j) held[chosen[at + j].index] = rest[j];
    });
}

inline void take(const Row& row, const Candidate* chosen, int64_t count, void* values, Format to) {
    with_element(row.format, [&](auto* from_element) {
        with_element(to, [&](auto* to_element) {
            take_chosen(static_cast<const std::remove_pointer_t<decltype(from_element)>*>(row.grad), row.residual.after,
                        chosen, count, static_cast<decltype(to_element)>(values));
        });
    });
}

// Adds a voter's elements to a piece of the mean that begins at element `start` of their row.
inline void scatter(const Chosen& chosen, int64_t start, float weight, float* piece) {
    with_element(chosen.format, [&](auto* element) {
        const auto* values = static_cast<const std::remove_pointer_t<decltype(element)>*>(chosen.values);
        over_lanes<1>(0, chosen.count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
            const F8 shares = load(values + at, lanes) * weight;
            for (int64_t j = 0; j < size_of(lanes); ++j)
                piece[(chosen.long_indices ? static_cast<const int64_t*>(chosen.indices)[at + j]
                                           : static_cast<const int32_t*>(chosen.indices)[at + j]) -
                      start] += shares[j];
        });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
